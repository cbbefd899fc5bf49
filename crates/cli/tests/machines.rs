//! One job on three machines that share it by three real nodes of etcd. Workers, launchers, machines and nodes
//! are killed, stopped and cut off; every fault is seen to have its effect, and the weights are those of the
//! undisturbed run.

mod common;
#[path = "common/fleet.rs"]
mod fleet;

use std::process::exit;
use std::thread;
use std::time::Duration;

use candle_core::{DType, Device, Tensor};
use candle_nn::{Module, VarMap};
use common::{numbers, wait_until};
use fleet::{Fleet, MACHINES, PROGRAM, Pacer, STEPS, WHILE, WORKERS, hosts_or_skip};
use rustix::process::Signal;
use unisono::candle::{ElasticReplica, Parameters};
use unisono::prelude::*;
use unisono::sync::strategy::Compression;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Any number of workers will do.
const ANY: &str = "1:6";

/// A rank in a process of its own.
#[test]
fn as_worker() {
    let Ok(program) = std::env::var(PROGRAM) else { return };
    let result = match program.split_whitespace().collect::<Vec<_>>()[..] {
        ["train", steps, progress, hurry] => train(steps, &Pacer::new(progress, hurry), None),
        ["encode", steps, progress, hurry] => {
            train(steps, &Pacer::new(progress, hurry), Some("int8"))
        }
        _ => Err(format!("no such program: {program}").into()),
    };
    if let Err(error) = result {
        eprintln!("{error}");
        exit(1);
    }
}

fn train(steps: &str, pacer: &Pacer, codec: Option<&str>) -> Result<()> {
    let steps = steps.parse()?;
    let variables = VarMap::new();
    let parameters = Parameters::with_initializer(&variables, |_, shape, _| {
        (0..shape.elem_count()).map(|i| i as f32 * 0.001).collect()
    });
    let model = candle_nn::linear(40, 40, parameters.builder(DType::F32, &Device::Cpu))?;
    let codec = codec.map(str::parse).transpose()?;
    let settings = Settings { compression: codec.map(Compression::new), ..Settings::new(8) };
    let mut replica = ElasticReplica::join(&parameters, settings, "adamw".parse()?)?;
    while let Some(step) = replica.next_step(steps)? {
        pacer.pace(step);
        while let Some(shard) = replica.next_shard() {
            let inputs: Vec<f32> =
                (0..40).map(|i| ((i * shard as u64 + step) % 7) as f32).collect();
            let inputs = Tensor::from_vec(inputs, (1, 40), &Device::Cpu)?;
            replica.backward(&model.forward(&inputs)?.sqr()?.mean_all()?)?;
        }
        if let Some(stepped) = replica.step()? {
            pacer.applied(stepped.step)?;
        }
    }
    replica.finish(|replica| format!("weights {}\n", replica.weights_hash().to_hex()))?;
    Ok(())
}

#[test]
fn three_machines_train_as_one() {
    let Some(lab) = hosts_or_skip() else { return };
    let Some(mut fleet) = Fleet::new(&lab) else { return };
    // With fewer than all workers it does not begin.
    fleet.start_all(0..MACHINES, "6:6");
    let status = fleet.status(1);
    let members = status["members"].as_array().expect("the epoch has members");
    assert_eq!(members.len(), MACHINES * WORKERS, "{status}");
    // Each has a process, and shards of its own: 8 of 6 workers.
    let shards = members.iter().map(|member| member["shards"].as_array().expect("it has shards"));
    let count: u64 = shards.map(|it| it[1].as_u64().unwrap() - it[0].as_u64().unwrap()).sum();
    assert_eq!(count, 8, "{status}");
    assert!(members.iter().all(|member| member["pid"].is_u64()), "{status}");
    assert!(fleet.leader(0) < MACHINES);
    for machine in 0..MACHINES {
        assert_eq!(fleet.workers(machine).len(), WORKERS);
    }
    fleet.finish();
}

#[test]
fn a_worker_that_is_killed_comes_back() {
    let Some(lab) = hosts_or_skip() else { return };
    let Some(mut fleet) = Fleet::new(&lab) else { return };
    fleet.start_all(0..MACHINES, ANY);
    for machine in 0..MACHINES {
        let epoch = fleet.epoch(0);
        fleet.kill_worker(machine);
        fleet.wait_for_epoch_after(0, epoch);
        wait_until("it is started again", || fleet.workers(machine).len() == WORKERS);
        fleet.wait_until_all_train(0..MACHINES);
    }
    fleet.finish();
}

#[test]
fn the_others_go_on_when_a_launcher_is_killed_and_it_may_come_back() {
    let Some(lab) = hosts_or_skip() else { return };
    let Some(mut fleet) = Fleet::new(&lab) else { return };
    fleet.start_all(0..MACHINES, ANY);
    let leader = fleet.leader(0);
    let victim = (leader + 1) % MACHINES;
    let epoch = fleet.epoch(leader);
    fleet.kill_launcher(victim);
    fleet.wait_for_epoch_after(leader, epoch);
    assert_eq!(fleet.leader(leader), leader, "the leader was not harmed");
    fleet.wait_for_steps(leader, 10);

    fleet.start(victim, ANY);
    fleet.wait_for_steps(victim, 10);
    fleet.finish();
}

#[test]
fn another_launcher_leads_when_the_leading_one_is_killed() {
    let Some(lab) = hosts_or_skip() else { return };
    let Some(mut fleet) = Fleet::new(&lab) else { return };
    fleet.start_all(0..MACHINES, ANY);
    let first = fleet.leader(0);
    let [second, third] = [1, 2].map(|more| (first + more) % MACHINES);
    fleet.kill_launcher(first);
    wait_until("another launcher leads", || fleet.leader(second) != first);
    fleet.wait_for_steps(second, 10);
    fleet.wait_for_steps(third, 10);

    // And once more, when two are left, of which one is new.
    fleet.start(first, ANY);
    fleet.wait_for_steps(first, 10);
    let leader = fleet.leader(first);
    fleet.kill_launcher(leader);
    wait_until("another launcher leads", || fleet.leader(first) != leader);
    fleet.wait_for_steps(first, 10);
    fleet.finish();
}

#[test]
fn a_leading_launcher_that_was_stopped_finds_that_another_leads() {
    let Some(lab) = hosts_or_skip() else { return };
    let Some(mut fleet) = Fleet::new(&lab) else { return };
    fleet.start_all(0..MACHINES, ANY);
    let first = fleet.leader(0);
    let other = (first + 1) % MACHINES;
    fleet.signal(first, Signal::STOP);
    // A worker that is lost now needs a leader that answers.
    let epoch = fleet.epoch(other);
    fleet.kill_worker(other);
    wait_until("another launcher leads", || fleet.leader(other) != first);
    fleet.wait_for_epoch_after(other, epoch);
    fleet.wait_for_steps(other, 10);

    fleet.signal(first, Signal::CONT);
    fleet.wait_for_steps(first, 10);
    assert_ne!(fleet.leader(other), first, "it has taken the lead back");
    fleet.finish();
}

#[test]
fn a_machine_that_loses_power_is_given_up() {
    let Some(lab) = hosts_or_skip() else { return };
    let Some(mut fleet) = Fleet::new(&lab) else { return };
    fleet.start_all(0..MACHINES, ANY);
    let victim = fleet.leader(0);
    let other = (victim + 1) % MACHINES;
    let epoch = fleet.epoch(other);
    fleet.power_off(victim);
    fleet.wait_for_epoch_after(other, epoch);
    fleet.wait_for_steps(other, 10);
    assert_ne!(fleet.leader(other), victim);

    fleet.heal(victim);
    fleet.start(victim, ANY);
    fleet.wait_for_steps(victim, 10);
    fleet.finish();
}

#[test]
fn the_loss_of_the_leader_of_etcd_is_not_noticed() {
    let Some(lab) = hosts_or_skip() else { return };
    let Some(mut fleet) = Fleet::new(&lab) else { return };
    fleet.start_all(0..MACHINES, ANY);
    let epoch = fleet.epoch(0);
    let node = fleet.kill_etcd_leader();
    fleet.wait_until_all_train(0..MACHINES);
    assert_eq!(fleet.epoch(0), epoch, "the epoch has changed for nothing");
    // With one node less, everything else still works.
    fleet.kill_worker(1);
    fleet.wait_for_epoch_after(0, epoch);
    fleet.wait_until_all_train(0..MACHINES);
    fleet.etcd.restart(node).unwrap();
    fleet.etcd.wait_until_healthy(node).unwrap();
    fleet.finish();
}

#[test]
fn a_worker_and_the_leader_of_etcd_may_be_lost_at_once() {
    let Some(lab) = hosts_or_skip() else { return };
    let Some(mut fleet) = Fleet::new(&lab) else { return };
    fleet.start_all(0..MACHINES, ANY);
    for victim in [1, 2] {
        let epoch = fleet.epoch(0);
        let node = fleet.etcd.leader().unwrap();
        fleet.etcd.kill(node);
        fleet.kill_worker(victim);
        fleet.wait_for_epoch_after(0, epoch);
        assert_ne!(fleet.etcd.leader().unwrap(), node);
        fleet.wait_until_all_train(0..MACHINES);
        fleet.etcd.restart(node).unwrap();
        fleet.etcd.wait_until_healthy(node).unwrap();
    }
    fleet.finish();
}

#[test]
fn without_etcd_steps_go_on_and_changes_wait() {
    let Some(lab) = hosts_or_skip() else { return };
    let Some(mut fleet) = Fleet::new(&lab) else { return };
    fleet.start_all(0..MACHINES, ANY);
    let epoch = fleet.epoch(0);
    fleet.stop_etcd();
    // For longer than any timeout.
    for _ in 0..4 {
        fleet.wait_until_all_train(0..MACHINES);
        thread::sleep(WHILE / 4);
    }

    fleet.kill_worker(1);
    fleet.assert_no_progress(&[0, 1, 2]);
    fleet.cont_etcd();
    fleet.wait_for_epoch_after(0, epoch);
    fleet.wait_until_all_train(0..MACHINES);
    fleet.finish();
}

/// As when a batch system cancels a job, or all its pods are deleted.
#[test]
fn machines_that_are_all_told_to_leave_stop_and_say_so() {
    let Some(lab) = hosts_or_skip() else { return };
    let Some(mut fleet) = Fleet::new(&lab) else { return };
    fleet.patience = 10;
    fleet.start_all(0..MACHINES, ANY);
    (0..MACHINES).for_each(|machine| fleet.signal(machine, Signal::TERM));
    for machine in 0..MACHINES {
        let ended = fleet.expect_some_end(machine);
        // The first may have left before the others were told.
        let code = ended.status.code();
        assert!(matches!(code, Some(0 | 143)), "m{machine}: {code:?}, {}", ended.stderr);
        assert!(!ended.stdout.contains("weights"), "the run was not over: {}", ended.stdout);
    }
    // The same commands go on with the job, once they have waited for members that might come back.
    fleet.start_all(0..MACHINES, ANY);
    fleet.finish();
}

#[test]
fn a_run_ends_when_etcd_comes_back_if_it_was_away_at_the_end() {
    let Some(lab) = hosts_or_skip() else { return };
    let Some(mut fleet) = Fleet::new(&lab) else { return };
    fleet.start_all(0..MACHINES, ANY);
    fleet.stop_etcd();
    fleet.hurry();
    wait_until("all steps are made", || fleet.most_progress() == STEPS);
    fleet.cont_etcd();
    fleet.expect_end(Vec::new());
}

#[test]
fn a_machine_that_is_cut_off_commits_nothing_and_comes_back() {
    let Some(lab) = hosts_or_skip() else { return };
    let Some(mut fleet) = Fleet::new(&lab) else { return };
    fleet.start_all(0..MACHINES, ANY);
    let leader = fleet.leader(0);
    // Once a machine that follows, and once the one that leads.
    for victim in [(leader + 1) % MACHINES, leader] {
        let other = (victim + 1) % MACHINES;
        let epoch = fleet.epoch(other);
        fleet.cut(victim);
        fleet.assert_no_progress(&[victim]);
        fleet.wait_for_epoch_after(other, epoch);
        fleet.wait_for_steps(other, 10);
        assert_ne!(fleet.leader(other), victim);

        let epoch = fleet.epoch(other);
        fleet.heal(victim);
        fleet.wait_for_epoch_after(other, epoch);
        fleet.wait_for_steps(victim, 10);
    }
    fleet.finish();
}

/// The machine that is cut off has a node of etcd on its side, which is no use to it.
#[test]
fn the_side_with_most_of_etcd_goes_on() {
    let Some(lab) = hosts_or_skip() else { return };
    let Some(mut fleet) = Fleet::new(&lab) else { return };
    fleet.start_all(0..MACHINES, ANY);
    let epoch = fleet.epoch(0);
    let node = fleet.etcd.leader().unwrap();
    // Two machines of three are the smaller side if most of etcd is on the other.
    fleet.separate(&[1, 2], &[node]);
    fleet.assert_no_progress(&[1, 2]);
    fleet.wait_for_epoch_after(0, epoch);
    fleet.wait_for_steps(0, 10);
    assert_eq!(fleet.leader(0), 0);

    fleet.reunite();
    fleet.wait_until_all_train(0..MACHINES);
    fleet.finish();
}

/// All machines reach each other, and none reaches etcd.
#[test]
fn machines_that_are_cut_off_from_etcd_go_on_together() {
    let Some(lab) = hosts_or_skip() else { return };
    let Some(mut fleet) = Fleet::new(&lab) else { return };
    fleet.start_all(0..MACHINES, ANY);
    let epoch = fleet.epoch(0);
    fleet.separate(&[0, 1, 2], &[]);
    for _ in 0..4 {
        fleet.wait_until_all_train(0..MACHINES);
        thread::sleep(WHILE / 4);
    }
    fleet.reunite();
    assert_eq!(fleet.epoch(0), epoch, "the epoch has changed for nothing");
    fleet.finish();
}

#[test]
fn a_machine_that_arrives_later_is_let_in() {
    let Some(lab) = hosts_or_skip() else { return };
    let Some(mut fleet) = Fleet::new(&lab) else { return };
    fleet.start_all(0..1, ANY);
    for machine in 1..MACHINES {
        let epoch = fleet.epoch(0);
        fleet.start(machine, ANY);
        fleet.wait_for_epoch_after(0, epoch);
        fleet.wait_until_all_train(0..machine + 1);
    }
    fleet.finish();
}

#[test]
fn a_launcher_that_gets_sigterm_leaves_and_the_others_go_on() {
    let Some(lab) = hosts_or_skip() else { return };
    let Some(mut fleet) = Fleet::new(&lab) else { return };
    fleet.start_all(0..MACHINES, ANY);
    // The leading one first.
    let first = fleet.leader(0);
    let [second, third] = [1, 2].map(|more| (first + more) % MACHINES);
    let epoch = fleet.epoch(second);
    fleet.signal(first, Signal::TERM);
    let left = fleet.expect_success(first);
    assert!(!left.stdout.contains("weights"), "the run was not over: {}", left.stdout);
    fleet.wait_for_epoch_after(second, epoch);
    fleet.wait_for_steps(second, 10);
    fleet.wait_for_steps(third, 10);
    assert_ne!(fleet.leader(second), first);

    fleet.signal(third, Signal::TERM);
    let also = fleet.expect_success(third);
    fleet.wait_for_steps(second, 10);
    fleet.hurry();
    fleet.expect_end(vec![left, also]);
}

/// What a codec remembers is with all workers, also with those that are let go.
#[test]
fn a_machine_that_leaves_takes_no_compressed_run_back() {
    let Some(lab) = hosts_or_skip() else { return };
    let Some(mut fleet) = Fleet::of(&lab, "encode") else { return };
    fleet.start_all(0..MACHINES, ANY);
    let mut left = Vec::new();
    // Whichever had rank 0, the last one has it in the end.
    for machine in 0..MACHINES - 1 {
        let epoch = fleet.epoch(MACHINES - 1);
        fleet.signal(machine, Signal::TERM);
        left.push(fleet.expect_success(machine));
        fleet.wait_for_epoch_after(MACHINES - 1, epoch);
        fleet.wait_for_steps(MACHINES - 1, 10);
    }
    fleet.hurry();
    let repeated: Vec<usize> = (0..MACHINES).map(|machine| fleet.repeated(machine)).collect();
    assert_eq!(repeated, [0; MACHINES]);
    fleet.expect_end(left);
}

#[test]
fn one_worker_becomes_eight_and_then_three() {
    let Some(lab) = hosts_or_skip() else { return };
    let Some(mut fleet) = Fleet::new(&lab) else { return };
    let range = "1:8";
    let await_members = |fleet: &Fleet<'_>, count: usize| {
        wait_until(&format!("{count} workers train"), || fleet.members(1) == count);
    };
    fleet.start_with(0, range, 1);
    fleet.wait_for_steps(0, 5);
    await_members(&fleet, 1);
    fleet.start_with(1, range, 3);
    fleet.start_with(2, range, 4);
    await_members(&fleet, 8);
    fleet.wait_until_all_train(0..MACHINES);

    fleet.signal(2, Signal::TERM);
    let left = fleet.expect_success(2);
    await_members(&fleet, 4);
    fleet.signal(0, Signal::TERM);
    let also = fleet.expect_success(0);
    await_members(&fleet, 3);
    fleet.wait_for_steps(1, 5);
    fleet.hurry();
    fleet.expect_end(vec![left, also]);
}

#[test]
fn random_faults_on_three_machines_change_no_bit() {
    let Some(lab) = hosts_or_skip() else { return };
    let mut dice = numbers();
    let mut roll = |sides: u32| dice.next().expect("they never end") % sides;
    let mut faults = [0; 5];
    for _ in 0..3 {
        let Some(mut fleet) = Fleet::new(&lab) else { return };
        fleet.start_all(0..MACHINES, ANY);
        for _ in 0..5 {
            let fault = roll(faults.len() as u32) as usize;
            let machine = roll(MACHINES as u32) as usize;
            match fault {
                0 => fleet.kill_worker(machine),
                1 => {
                    fleet.kill_launcher(machine);
                    fleet.start(machine, ANY);
                }
                2 => {
                    let node = fleet.kill_etcd_leader();
                    fleet.etcd.restart(node).unwrap();
                    fleet.etcd.wait_until_healthy(node).unwrap();
                }
                3 => {
                    fleet.cut(machine);
                    thread::sleep(Duration::from_millis(u64::from(roll(4000))));
                    fleet.heal(machine);
                }
                _ => {
                    fleet.kill_worker(machine);
                    fleet.kill_worker((machine + 1) % MACHINES);
                }
            }
            faults[fault] += 1;
            if roll(2) == 0 {
                fleet.wait_for_steps(machine, 3);
            }
        }
        fleet.wait_until_all_train(0..MACHINES);
        fleet.finish();
    }
    println!("{faults:?} faults of each kind");
    assert_eq!(faults.iter().sum::<u32>(), 15);
}
