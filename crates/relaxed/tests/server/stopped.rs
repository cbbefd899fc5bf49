//! Servers that are stopped, and say nothing: a worker finds out within the timeout, says whom it waits
//! for, and goes on when the server does, or ends with an error that names it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, Once};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use unisono_relaxed::Life;
use unisono_relaxed::server::{Client, ClientOptions, ServerError, Transport, fetch_weights};

use crate::lab::{Counter, Lab, NEVER, TRANSPORTS, counting, wait_until, within};
use crate::lockstep::Problem;
use crate::restarts::{Processes, count_through, expect_ledger};

/// What was logged.
static LOGGED: Mutex<Vec<String>> = Mutex::new(Vec::new());

struct Logger;

impl log::Log for Logger {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        if record.level() <= log::Level::Warn {
            LOGGED.lock().unwrap().push(record.args().to_string());
        }
    }

    fn flush(&self) {}
}

fn log_here() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        log::set_logger(&Logger).unwrap();
        log::set_max_level(log::LevelFilter::Warn);
    });
}

/// How many workers have said that they wait for a server.
fn waiting_for(lab: &Lab, server: usize) -> usize {
    let words = format!("waits for server {server} at {}", lab.addresses[server]);
    LOGGED.lock().unwrap().iter().filter(|line| line.contains(&words)).count()
}

impl Processes<'_> {
    fn stop(&self, number: usize) {
        let process = self.signal(number, Signal::STOP);
        let tasks = format!("/proc/{}/task", process.as_raw_nonzero());
        wait_until("every thread of it is stopped", || {
            std::fs::read_dir(&tasks).unwrap().all(|task| {
                let stat = task.and_then(|task| std::fs::read_to_string(task.path().join("stat")));
                stat.is_ok_and(|stat| stat.contains(") T "))
            })
        });
    }

    fn wake(&self, number: usize) {
        self.signal(number, Signal::CONT);
    }

    fn signal(&self, number: usize, signal: Signal) -> Pid {
        let process = Pid::from_child(self.children[number].as_ref().expect("it runs"));
        kill_process(process, signal).unwrap();
        process
    }
}

#[test]
fn a_server_that_is_stopped_is_named_by_an_error() {
    for transport in TRANSPORTS {
        for (servers, level) in [(1, "async"), (2, "ssp:0"), (2, "bsp")] {
            within(level, move || {
                let dir = tempfile::tempdir().unwrap();
                let lab = Lab::idle(servers, transport);
                let mut run = counting(level, 1);
                // A parameter for every server.
                run.shapes = vec![vec![1]; servers];
                run.codecs = vec![None; servers];
                run.timeout = Duration::from_millis(400);
                let processes = Processes::start(&lab, dir.path(), &run, 4000);
                let last = servers - 1;
                let patience = Duration::from_secs(1);
                let initial = |_: usize| vec![0.0];
                // They take their time to start.
                Client::join(&run, lab.options(0), &initial).unwrap().leave();
                let options = ClientOptions { patience, life: Some(Life(2)), ..lab.options(0) };
                let mut impatient = Client::join(&run, options, &initial).unwrap();
                let one = [1.0f32];
                let gradients: Vec<_> = (0..servers).map(|p| (p, vec![&one[..]])).collect();
                let mut step =
                    || impatient.push_pull(&gradients, Default::default(), &mut |_, _, _| {});
                step().unwrap();
                processes.stop(last);
                let error = step().unwrap_err();
                let is_named = matches!(
                    &error,
                    ServerError::Unreachable { server, address, .. }
                        if *server == last && *address == lab.addresses[last].to_string()
                );
                assert!(is_named, "{error}");
                // Nor does a process that only asks wait for ever.
                let options = ClientOptions { patience, ..lab.options(0) };
                let error = fetch_weights(&run, &options).unwrap_err();
                assert!(matches!(error, ServerError::Unreachable { .. }), "{error}");
            });
        }
    }
}

/// A large push does not fit into the buffers on the way to a server that takes nothing.
#[test]
fn a_server_that_takes_nothing_is_named_by_an_error() {
    within("a large push", || {
        let dir = tempfile::tempdir().unwrap();
        let lab = Lab::idle(1, Transport::Tcp);
        let mut run = counting("async", 1);
        run.shapes = vec![vec![8 << 20]];
        run.timeout = Duration::from_millis(400);
        let processes = Processes::start(&lab, dir.path(), &run, 1 << 30);
        let options = ClientOptions { patience: Duration::from_secs(1), ..lab.options(0) };
        let mut worker = Client::join(&run, options, &|_| vec![0.0; 8 << 20]).unwrap();
        processes.stop(0);
        let gradient = vec![1.0; 8 << 20];
        let error = worker.push(&[(0, vec![&gradient[..]])], Default::default()).unwrap_err();
        assert!(matches!(error, ServerError::Unreachable { server: 0, .. }), "{error}");
    });
}

#[test]
fn a_server_that_wakes_up_after_the_timeout_is_no_harm() {
    log_here();
    for (transport, level, servers) in
        [(Transport::Auto, "async", 1), (Transport::Tcp, "ssp:2", 2), (Transport::Auto, "ssp:0", 2)]
    {
        within(level, move || {
            let dir = tempfile::tempdir().unwrap();
            let lab = Lab::idle(servers, transport);
            let mut run = counting(level, 2);
            run.timeout = Duration::from_secs(1);
            let processes = Processes::start(&lab, dir.path(), &run, 4000);
            let stopped = servers - 1;
            let pushed = count_through(&lab, &run, |pushes| {
                wait_until("they work", || pushes() > 20);
                processes.stop(stopped);
                wait_until("both say whom they wait for", || waiting_for(&lab, stopped) == 2);
                processes.wake(stopped);
                let enough = pushes() + 40;
                wait_until("they go on", || pushes() > enough);
            });
            expect_ledger(dir.path(), &pushed);
        });
    }
}

#[test]
fn a_server_that_wakes_up_before_the_timeout_is_not_noticed() {
    log_here();
    within("a short stop", || {
        let dir = tempfile::tempdir().unwrap();
        let (lab, mut run) = (Lab::idle(2, Transport::Auto), counting("ssp:1", 2));
        run.timeout = NEVER;
        let processes = Processes::start(&lab, dir.path(), &run, 4000);
        let pushed = count_through(&lab, &run, |pushes| {
            wait_until("they work", || pushes() > 20);
            processes.stop(1);
            let mut before = pushes();
            // What is under way at the other server comes to its end.
            wait_until("they wait", || {
                std::thread::sleep(Duration::from_millis(100));
                before == std::mem::replace(&mut before, pushes())
            });
            processes.wake(1);
            wait_until("they go on", || pushes() > before + 40);
        });
        assert_eq!(waiting_for(&lab, 1), 0);
        expect_ledger(dir.path(), &pushed);
    });
}

/// All connections end while it sleeps. It gathers its workers when it wakes up, so that every round is
/// still one of all.
#[test]
fn lockstep_keeps_its_bits_through_a_stop() {
    /// From one stop to the next. Workers that are through before it wait for it; there are enough of
    /// them that it mostly comes in the middle of one.
    const ROUNDS: u64 = 500;
    const STOPS: u64 = 2;
    log_here();
    for (transport, servers) in [(Transport::Tcp, 1), (Transport::Auto, 2)] {
        within("lock-step", move || {
            let dir = tempfile::tempdir().unwrap();
            let lab = Lab::idle(servers, transport);
            let mut problem = Problem::new("momentum", 3, 8, (STOPS + 1) * ROUNDS);
            problem.run.timeout = Duration::from_secs(2);
            let processes = Processes::start(&lab, dir.path(), &problem.run, 20_000);
            let (lab, problem, expected) = (&lab, &problem, problem.expected());
            let steps: [AtomicU64; 3] = Default::default();
            let limit = AtomicU64::new(ROUNDS);
            std::thread::scope(|scope| {
                let work = |worker: u32| {
                    let (step_of, limit) = (&steps[worker as usize], &limit);
                    let pace = move |step: u64| {
                        step_of.store(step, Ordering::Relaxed);
                        wait_until("the next stop", || step < limit.load(Ordering::Relaxed));
                    };
                    move || {
                        let initial = |parameter| problem.initial(parameter);
                        let options = lab.options(worker);
                        let client = Client::join(&problem.run, options, &initial).unwrap();
                        problem.work_at_pace(client, worker as usize, pace)
                    }
                };
                let workers: Vec<_> = (0..3).map(|worker| scope.spawn(work(worker))).collect();
                for stop in 0..STOPS {
                    // A worker that has done some rounds since the last stop does not wait any more,
                    // and says so when it waits again.
                    let enough = stop * ROUNDS + 20;
                    wait_until("rounds go on", || {
                        steps.iter().all(|step| step.load(Ordering::Relaxed) >= enough)
                    });
                    let stopped = stop as usize % servers;
                    let told = waiting_for(lab, stopped);
                    processes.stop(stopped);
                    limit.store((stop + 2) * ROUNDS, Ordering::Relaxed);
                    wait_until("all wait for it", || waiting_for(lab, stopped) == told + 3);
                    processes.wake(stopped);
                }
                for worker in workers {
                    assert_eq!(worker.join().unwrap(), expected);
                }
            });
            expect_ledger(dir.path(), &[3 * problem.run.total]);
        });
    }
}

/// A worker that is itself stopped, together with its server, has not waited meanwhile: neither gives a
/// connection up that is none the worse for it. Here it is only busy for longer than the timeout.
#[test]
fn a_worker_that_listens_late_finds_what_was_said_meanwhile() {
    log_here();
    for transport in TRANSPORTS {
        within("a busy worker", move || {
            let (lab, mut run) = (Lab::start(2, transport), counting("async", 2));
            run.timeout = Duration::from_millis(200);
            let mut worker = Counter::join(&lab, &run, 0);
            worker.push_pull().unwrap();
            std::thread::sleep(4 * run.timeout);
            worker.push_pull().unwrap();
            assert_eq!(waiting_for(&lab, 0) + waiting_for(&lab, 1), 0);
            assert_eq!(worker.seen[0], 2);
        });
    }
}
