//! Servers that end and begin again, in the middle of a run: nothing that was acknowledged is lost, and
//! nothing is applied twice. Most of them are processes, and are killed.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use unisono_insight::relaxed::folder::RelaxedFolder;
use unisono_insight::updates::UpdateRecord;
use unisono_relaxed::server::core::PushId;
use unisono_relaxed::server::wire::{Measured, Part, Reply, Request};
use unisono_relaxed::server::{Client, ClientOptions, Files, Run, Server, Transport};
use unisono_relaxed::{Clock, Life};

use crate::lab::{
    Counter, Lab, TRANSPORTS, call, counting, counts, listener, recorded, run_folder,
    server_options, wait_until, within,
};
use crate::lockstep::Problem;

/// Tells a process that it is a server: its number, address, parent and folder, after how many bytes it
/// takes snapshots, and whether it keeps records.
const AS_SERVER: &str = "UNISONO_TEST_AS_SERVER";

/// How the process of a server ends that cannot go on.
const CANNOT_GO_ON: i32 = 23;

/// Not a test, but the process of a server.
#[test]
fn as_server() {
    let Ok(text) = std::env::var(AS_SERVER) else { return };
    let [number, address, parent, folder, snapshot_after, keeps_records] =
        text.split('|').collect::<Vec<_>>().try_into().unwrap();
    let files = files(Path::new(folder), number.parse().unwrap(), snapshot_after.parse().unwrap());
    let records = Path::new(folder).join("run");
    let options = server_options(files, (keeps_records == "true").then_some(&records));
    let listener = listener(address.parse().unwrap());
    let server = Server::start(listener, options).unwrap();
    // It does not outlive a test that fails.
    let parent: u32 = parent.parse().unwrap();
    match server.serve_until(|| std::os::unix::process::parent_id() != parent) {
        Ok(()) => {}
        Err(_) => {
            // Long enough for workers to come back and be told something wrong; then as a crash, so
            // that nothing is tidied up.
            std::thread::sleep(Duration::from_millis(200));
            std::process::exit(CANNOT_GO_ON);
        }
    }
}

fn files(folder: &Path, number: usize, snapshot_after: u64) -> Files {
    Files {
        number,
        journal: Some(folder.join(format!("journal-{number}"))),
        sync: false,
        snapshot_after: Some(snapshot_after),
    }
}

/// The processes of servers, killed when this is dropped.
pub struct Processes<'a> {
    lab: &'a Lab,
    folder: &'a Path,
    pub children: Vec<Option<Child>>,
    /// Small, so that snapshots are taken all the time.
    snapshot_after: u64,
    keeps_records: bool,
}

impl<'a> Processes<'a> {
    pub fn start(lab: &'a Lab, folder: &'a Path, run: &Run, snapshot_after: u64) -> Processes<'a> {
        let mut processes = Processes::idle(lab, folder, run, snapshot_after);
        (0..lab.addresses.len()).for_each(|number| processes.spawn(number, ""));
        processes
    }

    pub fn idle(lab: &'a Lab, folder: &'a Path, run: &Run, snapshot_after: u64) -> Processes<'a> {
        run_folder(&folder.join("run"), run);
        let children = lab.addresses.iter().map(|_| None).collect();
        Processes { lab, folder, children, snapshot_after, keeps_records: true }
    }

    /// Starts a server, after some commands of a shell.
    pub fn spawn(&mut self, number: usize, before: &str) {
        let (address, parent) = (self.lab.addresses[number], std::process::id());
        let Processes { snapshot_after, keeps_records, .. } = self;
        let folder = self.folder.display();
        let text = format!("{number}|{address}|{parent}|{folder}|{snapshot_after}|{keeps_records}");
        let child = Command::new("sh")
            .arg("-c")
            .arg(format!("{before} exec \"$0\" --exact restarts::as_server --nocapture"))
            .arg(std::env::current_exe().unwrap())
            .env(AS_SERVER, text)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        self.children[number] = Some(child);
    }

    /// With SIGKILL.
    fn kill(&mut self, number: usize) {
        let mut child = self.children[number].take().expect("it runs");
        child.kill().unwrap();
        child.wait().unwrap();
    }
}

impl Drop for Processes<'_> {
    fn drop(&mut self) {
        for child in self.children.iter_mut().flatten() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Workers that count, until `disturb` is done. What they count must be what is there.
pub fn count_through(lab: &Lab, run: &Run, disturb: impl FnOnce(&dyn Fn() -> u64)) -> Vec<u64> {
    let (over, pushes) = (AtomicBool::new(false), AtomicU64::new(0));
    let pushed = std::thread::scope(|scope| {
        let work = |worker: u32| {
            let (over, pushes) = (&over, &pushes);
            move || {
                let mut worker_at = Counter::join(lab, run, worker);
                worker_at.pull().unwrap();
                let mut own = 0;
                while !over.load(Ordering::Relaxed) {
                    worker_at.push_pull().unwrap();
                    own += 1;
                    pushes.fetch_add(1, Ordering::Relaxed);
                    assert_eq!(worker_at.seen[worker as usize], own, "lost, or applied twice");
                }
                worker_at.client.leave();
                own
            }
        };
        let workers: Vec<_> = (0..run.workers).map(|worker| scope.spawn(work(worker))).collect();
        disturb(&|| pushes.load(Ordering::Relaxed));
        over.store(true, Ordering::Relaxed);
        workers.into_iter().map(|worker| worker.join().unwrap()).collect::<Vec<u64>>()
    });
    assert_eq!(counts(&lab.weights(run)), pushed);
    for report in lab.reports(run) {
        assert_eq!(report.ledger.applied, pushed.iter().sum::<u64>());
        assert_eq!(report.updates, report.ledger.applied);
    }
    pushed
}

pub fn expect_ledger(folder: &Path, pushed: &[u64]) {
    let ledger = recorded(&folder.join("run")).ledger().unwrap();
    let total: u64 = pushed.iter().sum();
    assert_eq!((ledger.pushes, ledger.applied), (total, total), "{ledger:?}");
    assert_eq!((ledger.dropped, ledger.partial), (0, 0), "{ledger:?}");
}

#[test]
fn nothing_acknowledged_is_lost_and_nothing_applied_twice() {
    for (transport, level, servers) in [
        (Transport::Tcp, "async", 1),
        (Transport::Auto, "async", 2),
        (Transport::Tcp, "ssp:2", 2),
        (Transport::Auto, "ssp:0", 1),
    ] {
        within(level, move || {
            let dir = tempfile::tempdir().unwrap();
            let lab = Lab::idle(servers, transport);
            let mut run = counting(level, 3);
            run.timeout = Duration::from_secs(20);
            let mut processes = Processes::start(&lab, dir.path(), &run, 4000);
            let pushed = count_through(&lab, &run, |pushes| {
                for kill in 0..8 {
                    // In the middle of work, at a different place each time.
                    let enough = pushes() + 5 + 7 * kill;
                    wait_until("they go on", || pushes() > enough);
                    std::thread::sleep(Duration::from_micros(313 * kill));
                    processes.kill(kill as usize % servers);
                    processes.spawn(kill as usize % servers, "");
                }
                let enough = pushes() + 20;
                wait_until("they go on after the last kill", || pushes() > enough);
            });
            expect_ledger(dir.path(), &pushed);
            // What was replayed is what was there.
            let weights = lab.weights(&run);
            (0..servers).for_each(|number| processes.kill(number));
            (0..servers).for_each(|number| processes.spawn(number, ""));
            assert_eq!(lab.weights(&run), weights);
            expect_ledger(dir.path(), &pushed);
        });
    }
}

/// In lock-step a restarted server gathers its workers, so that every round is still one of all, and the
/// bits are those of a run in which no server was killed.
#[test]
fn lockstep_keeps_its_bits_through_kills() {
    for (transport, optimizer, servers) in
        [(Transport::Tcp, "adamw", 1), (Transport::Auto, "momentum", 2)]
    {
        within(optimizer, move || {
            let dir = tempfile::tempdir().unwrap();
            let lab = Lab::idle(servers, transport);
            let mut problem = Problem::new(optimizer, 3, 8, 150);
            problem.run.timeout = Duration::from_secs(20);
            let mut processes = Processes::start(&lab, dir.path(), &problem.run, 20_000);
            let (lab, problem, expected) = (&lab, &problem, problem.expected());
            std::thread::scope(|scope| {
                let work = |worker: u32| {
                    move || {
                        let initial = |parameter| problem.initial(parameter);
                        let options = lab.options(worker);
                        let client = Client::join(&problem.run, options, &initial).unwrap();
                        problem.work(client, worker as usize)
                    }
                };
                let workers: Vec<_> = (0..3).map(|worker| scope.spawn(work(worker))).collect();
                for kill in 0..6 {
                    let enough = 10 + 20 * kill;
                    lab.wait_for(&problem.run, "rounds go on", |report| report.updates >= enough);
                    processes.kill(kill as usize % servers);
                    processes.spawn(kill as usize % servers, "");
                }
                for worker in workers {
                    assert_eq!(worker.join().unwrap(), expected);
                }
            });
            assert_eq!(lab.weights(&problem.run), expected);
            expect_ledger(dir.path(), &[3 * 150]);
        });
    }
}

/// A server that cannot write must not acknowledge. The limit on the size of files stands for a full
/// disk; whichever file reaches it first.
#[test]
fn what_cannot_be_written_is_not_acknowledged() {
    for keeps_records in [true, false] {
        within("a full disk", move || {
            let dir = tempfile::tempdir().unwrap();
            let lab = Lab::idle(1, Transport::Tcp);
            let run = counting("async", 2);
            let mut processes = Processes::idle(&lab, dir.path(), &run, u64::MAX);
            processes.keeps_records = keeps_records;
            let full = "trap '' XFSZ; ulimit -f 32;";
            processes.spawn(0, full);
            let pushed = count_through(&lab, &run, |pushes| {
                let child = processes.children[0].as_mut().unwrap();
                wait_until("the disk is full", || child.try_wait().unwrap().is_some());
                let status = child.try_wait().unwrap().unwrap();
                assert_eq!(status.code(), Some(CANNOT_GO_ON));
                assert!(pushes() > 10, "{} pushes", pushes());
                processes.spawn(0, "");
                let enough = pushes() + 20;
                wait_until("they go on", || pushes() > enough);
            });
            if keeps_records {
                expect_ledger(dir.path(), &pushed);
            }
        });
    }
}

fn newest_journal(folder: &Path) -> PathBuf {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let is_journal =
        |path: &PathBuf| path.file_name().unwrap().to_string_lossy().starts_with("jour");
    let number = |path: &PathBuf| {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        name.strip_prefix("journal-").unwrap().parse::<u64>().unwrap()
    };
    entries.filter(is_journal).max_by_key(number).unwrap()
}

/// Within one process: a server is dropped, its journal ends in half a record, and it begins again.
#[test]
fn half_a_record_at_the_end_is_no_harm() {
    for transport in TRANSPORTS {
        within("half a record", move || {
            let dir = tempfile::tempdir().unwrap();
            let mut lab = Lab::idle(1, transport);
            let run = counting("async", 2);
            lab.record(&dir.path().join("run"), &run);
            let files = files(dir.path(), 0, 2000);
            lab.serve(files.clone());
            let mut workers = [Counter::join(&lab, &run, 0), Counter::join(&lab, &run, 1)];
            let mut rounds = 0;
            for _ in 0..10 {
                for _ in 0..7 {
                    workers.iter_mut().for_each(|worker| {
                        worker.push_pull().unwrap();
                    });
                    rounds += 1;
                }
                lab.servers[0] = None;
                let journal = newest_journal(files.journal.as_ref().unwrap());
                // Shorter than any head.
                let torn = std::fs::read(&journal).unwrap()[..20].to_vec();
                File::options().append(true).open(&journal).unwrap().write_all(&torn).unwrap();
                lab.serve(files.clone());
            }
            workers.iter_mut().for_each(|worker| worker.pull().unwrap());
            assert_eq!(workers[0].seen, [rounds, rounds]);
            expect_ledger(dir.path(), &[rounds, rounds]);
        });
    }
}

/// A worker that begins a new life has numbers of its own, also after a restart.
#[test]
fn lives_survive_a_restart() {
    within("lives", || {
        let dir = tempfile::tempdir().unwrap();
        let mut lab = Lab::idle(1, Transport::Tcp);
        let run = counting("async", 1);
        lab.record(&dir.path().join("run"), &run);
        let files = files(dir.path(), 0, 1 << 20);
        lab.serve(files.clone());
        for life in 1..6 {
            let options = ClientOptions { life: Some(Life(life)), ..lab.options(0) };
            let mut worker = Counter::new(lab.try_client(&run, options).unwrap(), &run, 0);
            worker.push().unwrap();
            lab.servers[0] = None;
            lab.serve(files.clone());
            worker.push_pull().unwrap();
            assert_eq!((worker.seen, worker.client.clock().0), (vec![2 * life], 2 * life));
        }
        let ledger = recorded(&dir.path().join("run")).ledger().unwrap();
        assert_eq!((ledger.pushes, ledger.lives), (10, 5));
        let older = ClientOptions { life: Some(Life(4)), ..lab.options(0) };
        assert!(lab.try_client(&run, older).is_err());
    });
}

/// However often and wherever a worker is started: the servers know how often that was. Neither a clock
/// nor the count of a launcher is asked.
#[test]
fn the_servers_number_the_lives_of_workers() {
    for transport in TRANSPORTS {
        within("numbers", move || {
            let dir = tempfile::tempdir().unwrap();
            let mut lab = Lab::idle(2, transport);
            let run = counting("async", 1);
            lab.record(&dir.path().join("run"), &run);
            let files = [files(dir.path(), 0, 1 << 20), files(dir.path(), 1, 1 << 20)];
            let next = |lab: &Lab| {
                let options = ClientOptions { life: None, ..lab.options(0) };
                Counter::new(lab.try_client(&run, options).unwrap(), &run, 0)
            };
            files.iter().for_each(|files| lab.serve(files.clone()));
            for round in 1..4 {
                // Everything starts again, as by a new launcher; one life is lost without a push.
                next(&lab);
                let mut old = next(&lab);
                old.push().unwrap();
                let mut new = next(&lab);
                assert!(old.push().is_err(), "a later life has taken its place");
                new.push_pull().unwrap();
                assert_eq!(new.seen, [2 * round]);
                drop((old, new));
                for (number, files) in files.iter().enumerate() {
                    lab.servers[number] = None;
                    lab.serve(files.clone());
                }
            }
            let lives: Vec<u64> = updates(&dir.path().join("run"), 0);
            assert_eq!(lives, [2, 3, 5, 6, 8, 9]);
        });
    }
}

/// The lives of the pushes that a server has recorded.
fn updates(run: &Path, number: usize) -> Vec<u64> {
    let text = std::fs::read_to_string(RelaxedFolder::updates(run, number)).unwrap();
    let line = |line: &str| serde_json::from_str::<UpdateRecord>(line).unwrap().life;
    text.lines().map(line).collect()
}

/// The journal was removed. The records of the run that is gone are not those of the next, which
/// says so before it has begun, and again.
#[test]
fn a_run_without_its_journal_leaves_the_records_of_the_one_before_alone() {
    within("records", || {
        let dir = tempfile::tempdir().unwrap();
        let mut lab = Lab::idle(1, Transport::Tcp);
        let run = counting("async", 1);
        lab.record(&dir.path().join("run"), &run);
        let files = files(dir.path(), 0, 1 << 20);
        lab.serve(files.clone());
        Counter::join(&lab, &run, 0).push().unwrap();
        lab.servers[0] = None;
        std::fs::remove_dir_all(files.journal.as_ref().unwrap()).unwrap();
        for _ in 0..2 {
            lab.serve(files.clone());
            let hasty = ClientOptions { patience: Duration::from_millis(1), ..lab.options(0) };
            assert!(lab.try_client(&run, hasty).is_err());
            let error = lab.servers[0].take().unwrap().serve_until(|| false).unwrap_err();
            assert!(error.to_string().contains("already holds a run"), "{error}");
            assert_eq!(updates(&dir.path().join("run"), 0), [1]);
        }
    });
}

/// The same life in a new process, as if its launcher had numbered it wrongly: its numbers go on.
#[test]
fn a_life_that_begins_again_loses_no_push() {
    within("the same life", || {
        let (lab, run) = (Lab::start(2, Transport::Tcp), counting("async", 1));
        for turn in 1..4 {
            let mut worker = Counter::join(&lab, &run, 0);
            worker.push_pull().unwrap();
            assert_eq!(worker.seen, [turn]);
        }
    });
}

/// The bound adapts to what is said of waiting, and every move is recorded; also that it begins anew.
#[test]
fn a_bound_that_adapts_begins_anew() {
    within("a bound", || {
        let dir = tempfile::tempdir().unwrap();
        let mut lab = Lab::idle(1, Transport::Tcp);
        let run = counting("ssp:auto", 1);
        lab.record(&dir.path().join("run"), &run);
        let files = files(dir.path(), 0, 1 << 20);
        lab.serve(files.clone());
        lab.client(&run, 0).leave();
        let mut link = lab.quiet(&run, 0, 0);
        let mut bounds = BTreeSet::new();
        for number in 1..200 {
            let push = PushId { worker: 0, life: Life(1), number, clock: Clock(number - 1) };
            let measured = Measured { held: 0.9, wall: 1.0, loss: 1.0, ..Measured::default() };
            let part = Part { piece: 0, vectors: 1, bytes: 4, encoded: false };
            let request = Request::Push { push, measured, parts: vec![part] };
            match call(&mut link, &request, &[&1.0f32.to_le_bytes()]) {
                Some(Reply::Pushed { applied: true, bound: Some(bound), .. }) => {
                    bounds.insert(bound)
                }
                other => panic!("{other:?}"),
            };
        }
        assert!(bounds.len() > 1, "{bounds:?}");
        lab.servers[0] = None;
        lab.serve(files);
        let moves = recorded(&dir.path().join("run")).moves;
        assert_eq!(moves.first().map(|first| first.from), bounds.first().copied());
        assert!(moves.windows(2).all(|two| two[0].to == two[1].from), "{moves:?}");
        let last = moves.last().unwrap();
        assert_eq!(Some(&last.to), bounds.first());
        assert!(last.reason.contains("started again"), "{last:?}");
    });
}
