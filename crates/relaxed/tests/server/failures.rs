//! What goes wrong, and that the error says what.

use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use std::sync::mpsc::channel;
use std::time::Duration;

use unisono_net::Token;
use unisono_relaxed::server::wire::Measured;
use unisono_relaxed::server::{
    Client, ClientOptions, Files, Run, ServerError, Transport, fetch_weights, reports,
};

use crate::lab::{Counter, HUNG, Lab, NEVER, TRANSPORTS, counting, descent, within, zeros};
use crate::restarts::Processes;

#[test]
fn a_stopper_ends_every_wait() {
    for transport in TRANSPORTS {
        for level in ["bsp", "ssp:0"] {
            within(level, move || {
                let (lab, run) = (Lab::start(2, transport), counting(level, 2));
                let (mut waits, _idle) =
                    (Counter::join(&lab, &run, 0), Counter::join(&lab, &run, 1));
                let stopper = waits.client.stopper();
                let waiting = std::thread::spawn(move || {
                    let first = waits.push_pull().map(drop);
                    (first, waits.pull(), waits.push().map(drop))
                });
                if level == "ssp:0" {
                    lab.wait_for(&run, "it has pushed", |report| report.ledger.applied == 1);
                }
                stopper.stop();
                let (first, second, third) = waiting.join().unwrap();
                for result in [first, second, third] {
                    assert!(matches!(result, Err(ServerError::Stopped)), "{result:?}");
                }
            });
        }
    }
}

#[test]
fn a_stopper_ends_the_search_for_a_server() {
    for transport in TRANSPORTS {
        within("a search", move || {
            let (mut lab, run) = (Lab::start(1, transport), counting("async", 1));
            let options = ClientOptions { patience: NEVER, ..lab.options(0) };
            let mut worker = Counter::new(lab.try_client(&run, options).unwrap(), &run, 0);
            let stopper = worker.client.stopper();
            lab.servers[0] = None;
            let (begun, begins) = channel();
            let searching = std::thread::spawn(move || {
                begun.send(()).unwrap();
                worker.push_pull().map(drop)
            });
            begins.recv().unwrap();
            // Some attempts have failed by then, or not; it must end either way.
            std::thread::sleep(Duration::from_millis(100));
            stopper.stop();
            let result = searching.join().unwrap();
            assert!(matches!(result, Err(ServerError::Stopped)), "{result:?}");
        });
    }
}

#[test]
fn a_server_of_another_run_is_refused() {
    for transport in TRANSPORTS {
        within("another run", move || {
            let (lab, run) = (Lab::start(1, transport), counting("async", 1));
            let other = Run { optimizer: descent(0.5), ..run.clone() };
            let _first = lab.client(&run, 0);
            let error = lab.try_client(&other, lab.options(0)).map(drop).unwrap_err();
            assert!(matches!(error, ServerError::OtherRun { server: 0 }), "{error}");
            let error = fetch_weights(&other, &lab.options(0)).unwrap_err();
            assert!(matches!(error, ServerError::OtherRun { server: 0 }), "{error}");
        });
    }
}

#[test]
fn a_server_without_a_journal_forgets_and_says_so() {
    for transport in TRANSPORTS {
        within("forgetting", move || {
            let (mut lab, run) = (Lab::start(2, transport), counting("async", 2));
            let mut worker = Counter::join(&lab, &run, 0);
            worker.push_pull().unwrap();
            for server in [1, 0] {
                lab.servers[server] = None;
                lab.serve(Files { number: server, ..Files::default() });
            }
            let error = worker.push_pull().unwrap_err();
            assert!(matches!(error, ServerError::Forgotten { server: 0 }), "{error}");
            assert!(error.to_string().contains("journal"));
            // The worker that begins brings weights.
            Counter::join(&lab, &run, 1).push_pull().unwrap();
        });
    }
}

#[test]
fn another_token_is_refused() {
    for transport in TRANSPORTS {
        within("a token", move || {
            let (lab, run) = (Lab::start(1, transport), counting("async", 1));
            let options = ClientOptions { token: Token::from_bytes([6; 32]), ..lab.options(0) };
            let error = lab.try_client(&run, options).map(drop).unwrap_err();
            assert!(matches!(error, ServerError::Handshake { .. }), "{error}");
        });
    }
}

#[test]
fn servers_in_another_order_are_told_apart() {
    for transport in TRANSPORTS {
        within("an order", move || {
            let (lab, run) = (Lab::start(3, transport), counting("async", 1));
            let mut options = lab.options(0);
            options.servers.swap(1, 2);
            let errors = [
                lab.try_client(&run, options.clone()).map(drop).unwrap_err(),
                reports(&run, &options).map(drop).unwrap_err(),
            ];
            for error in errors {
                let is_named =
                    matches!(error, ServerError::OtherServer { server: 1, number: 2, .. });
                assert!(is_named, "{error}");
                assert!(error.to_string().contains(&options.servers[1]), "{error}");
            }
            options.servers.swap(0, 1);
            options.life = None;
            let error = lab.try_client(&run, options).map(drop).unwrap_err();
            assert!(
                matches!(error, ServerError::OtherServer { server: 0, number: 2, .. }),
                "{error}"
            );
        });
    }
}

#[test]
fn where_no_server_listens_patience_ends() {
    for transport in TRANSPORTS {
        within("patience", move || {
            let (lab, run) = (Lab::idle(1, transport), counting("async", 1));
            let patience = Duration::from_millis(50);
            for address in [lab.addresses[0].to_string(), "no address".into(), String::new()] {
                let servers = vec![address];
                let options = ClientOptions { patience, servers, ..lab.options(0) };
                let error = lab.try_client(&run, options.clone()).map(drop).unwrap_err();
                assert!(matches!(error, ServerError::Unreachable { server: 0, .. }), "{error}");
                let error = reports(&run, &options).unwrap_err();
                assert!(matches!(error, ServerError::Unreachable { server: 0, .. }), "{error}");
            }
        });
    }
}

#[test]
fn before_a_worker_has_joined_there_are_no_weights() {
    within("looking", || {
        let (lab, run) = (Lab::start(1, TRANSPORTS[0]), counting("async", 1));
        let hasty = ClientOptions { patience: Duration::from_millis(50), ..lab.options(0) };
        let error = fetch_weights(&run, &hasty).unwrap_err();
        assert!(error.to_string().contains("no worker has joined"), "{error}");
        let patient = ClientOptions { patience: HUNG, ..lab.options(0) };
        std::thread::scope(|scope| {
            let looking = scope.spawn(|| fetch_weights(&run, &patient).unwrap());
            Counter::join(&lab, &run, 0);
            assert_eq!(looking.join().unwrap(), [[0.0]]);
        });
    });
}

#[test]
fn runs_that_make_no_sense_are_refused() {
    within("nonsense", || {
        let good = counting("bsp", 2);
        let nonsense = [
            (Run { shards: 1, ..good.clone() }, "shards"),
            (Run { timeout: Duration::ZERO, ..good.clone() }, "timeout"),
            (Run { level: "gossip".parse().unwrap(), ..good.clone() }, "no servers"),
            (Run { workers: 1 << 20, shards: 1 << 20, ..good.clone() }, "workers"),
        ];
        // One server for all: what it refused leaves nothing behind, not even without the journal.
        let dir = tempfile::tempdir().unwrap();
        let files = Files { journal: Some(dir.path().join("journal")), ..Files::default() };
        let mut lab = Lab::idle(1, TRANSPORTS[0]);
        lab.serve(files.clone());
        for (run, flaw) in nonsense {
            let initial = |parameter| zeros(&run, parameter);
            let error = Client::join(&run, lab.options(0), &initial).map(drop).unwrap_err();
            let text = error.to_string();
            assert!(matches!(error, ServerError::Protocol { server: 0, .. }), "{text}");
            assert!(text.contains(flaw), "{text}");
        }
        // In lock-step the workers are counted.
        let error = lab.try_client(&good, lab.options(2)).map(drop).unwrap_err();
        assert!(error.to_string().contains("worker 2"), "{error}");

        let run = counting("async", 1);
        lab.servers[0] = None;
        std::fs::remove_dir_all(dir.path().join("journal")).unwrap();
        lab.serve(files.clone());
        let initial = |parameter| zeros(&good, parameter);
        let bad = Run { shards: 1, ..good.clone() };
        assert!(Client::join(&bad, lab.options(0), &initial).is_err());
        let mut worker = Counter::join(&lab, &run, 0);
        worker.push_pull().unwrap();
        lab.servers[0] = None;
        lab.serve(files);
        worker.push_pull().unwrap();
        assert_eq!(worker.seen, [2]);
    });
}

/// A server raises its limit of open files for its workers, as far as it can.
#[test]
fn a_server_that_may_not_open_enough_files_says_what_to_change() {
    within("a limit of open files", || {
        for (limit, is_enough) in [("-Sn 64", true), ("-n 64", false)] {
            let dir = tempfile::tempdir().unwrap();
            let (lab, run) = (Lab::idle(1, Transport::Tcp), counting("async", 20));
            let mut processes = Processes::idle(&lab, dir.path(), &run, 1 << 40);
            processes.spawn(0, &format!("ulimit {limit};"));
            match lab.try_client(&run, lab.options(0)) {
                Ok(_) => assert!(is_enough, "a hard limit was raised"),
                Err(error) => {
                    let text = error.to_string();
                    assert!(!is_enough && text.contains("ulimit -n"), "{limit}: {text}");
                }
            }
        }
    });
}

/// Where the system has no thread left for a large update, the thread that got the push makes it.
#[test]
fn a_server_without_threads_to_spare_serves_all_the_same() {
    // Of a user who has nothing else, only the threads of this process count.
    let user = 20_000 + std::process::id() % 40_000;
    let as_user = format!("setpriv --reuid={user} --regid={user} --clear-groups prlimit --nproc=");
    let runs_within = |threads: u32| {
        let program = std::env::current_exe().unwrap();
        let script = format!(
            "{as_user}{threads} sh -c 'test -x \"$0\" || exit 1; sleep 0 & sleep 0 & wait' \"$0\""
        );
        let output = Command::new("sh").arg("-c").arg(script).arg(program).output();
        output.is_ok_and(|output| output.status.success())
    };
    if !runs_within(50) || runs_within(1) {
        println!("SKIPPED: no limit on threads can be set here");
        return;
    }
    within("a large push", move || {
        const LENGTH: usize = 2 << 20;
        let dir = tempfile::tempdir().unwrap();
        let (lab, mut run) = (Lab::idle(1, Transport::Tcp), counting("async", 1));
        run.shapes = vec![vec![LENGTH]; 2];
        run.codecs = vec![None; 2];
        let mut processes = Processes::idle(&lab, dir.path(), &run, 1 << 40);
        // The main thread, that of the test, the acceptor, the ticker, and one for the worker.
        let limited = format!("exec {as_user}5 \"$0\" --exact restarts::as_server --nocapture;");
        let for_all_users = std::fs::Permissions::from_mode(0o777);
        std::fs::set_permissions(dir.path(), for_all_users.clone()).unwrap();
        std::fs::set_permissions(dir.path().join("run"), for_all_users).unwrap();
        processes.spawn(0, &limited);
        let mut worker = Client::join(&run, lab.options(0), &|_| vec![0.0; LENGTH]).unwrap();
        let gradient = vec![1.0; LENGTH];
        let gradients = [(0, vec![&gradient[..]]), (1, vec![&gradient[..]])];
        let mut taken = 0;
        let mut take = |_: usize, _: usize, weights: &[f32]| {
            assert!(weights.iter().all(|weight| *weight == -1.0));
            taken += weights.len();
        };
        worker.push_pull(&gradients, Measured::default(), &mut take).unwrap();
        assert_eq!(taken, 2 * LENGTH);
    });
}
