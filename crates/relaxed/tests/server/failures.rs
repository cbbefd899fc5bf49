//! What goes wrong, and that the error says what.

use std::sync::mpsc::channel;
use std::time::Duration;

use unisono_collective::handshake::Token;
use unisono_relaxed::server::{Client, ClientOptions, Files, Run, ServerError, look, reports};

use crate::lab::{Counter, HUNG, Lab, NEVER, TRANSPORTS, counting, descent, within, zeros};

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
            lab.shards[0] = None;
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
            let error = look(&other, &lab.options(0)).unwrap_err();
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
            for shard in [1, 0] {
                lab.shards[shard] = None;
                lab.serve(Files { number: shard, ..Files::default() });
            }
            let error = worker.push_pull().unwrap_err();
            assert!(matches!(error, ServerError::Forgotten { server: 0 }), "{error}");
            assert!(error.to_string().contains("journal"));
            // Whoever begins brings weights.
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
fn where_nobody_listens_patience_ends() {
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
fn before_anybody_has_joined_there_is_nothing_to_look_at() {
    within("looking", || {
        let (lab, run) = (Lab::start(1, TRANSPORTS[0]), counting("async", 1));
        let hasty = ClientOptions { patience: Duration::from_millis(50), ..lab.options(0) };
        let error = look(&run, &hasty).unwrap_err();
        assert!(error.to_string().contains("no worker has joined"), "{error}");
        let patient = ClientOptions { patience: HUNG, ..lab.options(0) };
        std::thread::scope(|scope| {
            let looking = scope.spawn(|| look(&run, &patient).unwrap());
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
        // One shard for all: what it refused leaves nothing behind, not even without the journal.
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
        lab.shards[0] = None;
        std::fs::remove_dir_all(dir.path().join("journal")).unwrap();
        lab.serve(files.clone());
        let initial = |parameter| zeros(&good, parameter);
        let bad = Run { shards: 1, ..good.clone() };
        assert!(Client::join(&bad, lab.options(0), &initial).is_err());
        let mut worker = Counter::join(&lab, &run, 0);
        worker.push_pull().unwrap();
        lab.shards[0] = None;
        lab.serve(files);
        worker.push_pull().unwrap();
        assert_eq!(worker.seen, [2]);
    });
}
