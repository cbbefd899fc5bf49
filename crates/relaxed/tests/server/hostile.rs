//! A process that has proved the token may still say anything: by mistake, or of another version. A server
//! answers or ends the connection, and serves the others as if nothing were.

use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use memmap2::MmapOptions;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use socket2::Socket;
use unisono_codec::dgc::DgcSettings;
use unisono_codec::spec::Values;
use unisono_codec::topk::Selection;
use unisono_codec::{CodecSpec, Wire};
use unisono_net::memory::{Memory, send_with};
use unisono_net::{Dialer, Introduction, frame};
use unisono_relaxed::downpour::Periods;
use unisono_relaxed::server::core::PushId;
use unisono_relaxed::server::layout::Piece;
use unisono_relaxed::server::link::Link;
use unisono_relaxed::server::wire::{self, Measured, Part, Reply, Request, Setup};
use unisono_relaxed::server::{Files, Run, Transport, unix_target};
use unisono_relaxed::spec::Level;
use unisono_relaxed::staleness::StalenessPolicy;
use unisono_relaxed::{Clock, Life};

use crate::lab::{Counter, HUNG, Lab, TOKEN, call, counting, counts, setup, within};

/// Everything that a hostile process may say: requests, and bytes after them.
fn insults(run: &Run) -> Vec<(Request, Vec<u8>)> {
    let good = setup(run, 1);
    let mut all = Vec::new();
    let mut say = |request: Request| all.push((request, vec![0; 64]));
    for run in [[0; 32], good.fingerprint()] {
        say(Request::Join { run });
        say(Request::Weights { run });
    }
    for clock in [0, 1, u64::MAX / 2, u64::MAX].map(Clock) {
        say(Request::Enter { clock });
        for pieces in [None, Some(vec![]), Some(vec![0, 0]), Some(vec![u32::MAX]), Some(vec![1])] {
            say(Request::Pull { clock, bound: Some(clock.0), pieces });
        }
    }
    let part = Part { piece: 0, vectors: 1, bytes: 8, encoded: false };
    let parts = [
        vec![],
        vec![part],
        vec![part, part],
        vec![Part { piece: u32::MAX, ..part }],
        vec![Part { vectors: 0, ..part }],
        vec![Part { vectors: u32::MAX, bytes: u64::MAX, ..part }],
        vec![Part { bytes: u64::MAX, ..part }],
        vec![Part { bytes: 7, ..part }],
        vec![Part { encoded: true, ..part }],
        vec![Part { encoded: true, bytes: u64::MAX, ..part }],
    ];
    let worker = 1;
    for parts in parts {
        for (worker, life) in [(worker, 1), (worker, 2), (0, 1), (u32::MAX, u64::MAX)] {
            for (number, clock) in [(0, 0), (1, 0), (1, 1), (2, 0), (u64::MAX, u64::MAX)] {
                let push = PushId { worker, life: Life(life), number, clock: Clock(clock) };
                let measured =
                    Measured { loss: f32::NAN, compute: f64::NAN, ..Measured::default() };
                say(Request::Push { push, measured, parts: parts.clone() });
            }
        }
    }
    for setup in absurd_setups(&good) {
        say(Request::SetUp(Box::new(setup)));
    }
    for worker in [1, u32::MAX] {
        say(Request::Life { worker });
    }
    say(Request::Beat);
    say(Request::Report);
    say(Request::Leave);
    all
}

fn absurd_setups(good: &Setup) -> Vec<Setup> {
    let piece = |shape: &[usize]| Piece { parameter: 0, start: 0, shape: shape.to_vec() };
    let with = |shapes: &[&[usize]]| Setup {
        pieces: shapes.iter().map(|shape| piece(shape)).collect(),
        codecs: vec![None; shapes.len()],
        ..good.clone()
    };
    let codec = |codec: CodecSpec| Setup { codecs: vec![Some(codec)], ..with(&[&[3]]) };
    let most = usize::MAX;
    vec![
        good.clone(),
        with(&[]),
        with(&[&[]]),
        with(&[&[0]]),
        with(&[&[most, most]]),
        with(&[&[0, most, most]]),
        with(&[&[most, 2, 0]]),
        with(&[&[1 << 60]]),
        with(&[&[1 << 34]]),
        with(&[&[1 << 37], &[1 << 37]]),
        with(&[&[most], &[most], &[most]]),
        Setup { pieces: vec![Piece { start: most, ..piece(&[4]) }], ..with(&[&[4]]) },
        Setup { codecs: vec![], ..good.clone() },
        Setup { workers: 0, shards: 0, ..good.clone() },
        Setup { workers: u32::MAX, shards: u32::MAX, ..good.clone() },
        Setup { workers: 5, shards: 4, ..good.clone() },
        Setup { timeout_ms: 0, ..good.clone() },
        Setup { timeout_ms: u64::MAX, total: 0, ..good.clone() },
        Setup { level: Level::Gossip, ..good.clone() },
        Setup { level: Level::Ssp(u64::MAX), ..good.clone() },
        Setup { level: Level::Downpour(Periods { push: 0, fetch: 1 }), ..good.clone() },
        Setup { stale: StalenessPolicy::Compensate(f32::NAN), ..good.clone() },
        codec(CodecSpec::PowerSgd(4, Wire::F32)),
        codec(CodecSpec::PowerSgd(usize::MAX, Wire::F32)),
        codec(CodecSpec::TopK(2.0, Selection::Exact, Values::F32)),
        codec(CodecSpec::RandK(f64::NAN, Wire::F32)),
        codec(CodecSpec::Qsgd(u32::MAX)),
        codec(CodecSpec::Dgc(DgcSettings { momentum: -1.0, ..Default::default() }, Values::F32)),
    ]
}

/// Says something, then nothing more, and waits until the server has ended the connection.
fn insult(mut socket: Socket, bytes: &[u8]) {
    // The server may have had enough before all is said.
    let _ = socket.write_all(bytes);
    let _ = socket.shutdown(Shutdown::Write);
    let mut replies = Vec::new();
    match socket.read_to_end(&mut replies) {
        Ok(_) => {}
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => {}
        Err(error) => panic!("the connection stays open: {error}"),
    }
}

fn text(request: &Request, rest: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    frame::append(request, &mut bytes).unwrap();
    bytes.extend_from_slice(rest);
    bytes
}

/// Bytes that follow from a seed.
fn noise(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 24) as u8
    };
    (0..length).map(|_| next()).collect()
}

/// A worker goes on undisturbed while `disturb` runs; the counts say that no other pushes count.
fn undisturbed(lab: &Lab, run: &Run, disturb: impl FnOnce()) {
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let working = scope.spawn(|| {
            let mut worker = Counter::join(lab, run, 0);
            worker.pull().unwrap();
            while !over.load(Ordering::Relaxed) || worker.client.clock() < Clock(10) {
                worker.push_pull().unwrap();
                assert_eq!(worker.seen[0], worker.client.clock().0);
            }
            worker.client.clock().0
        });
        disturb();
        over.store(true, Ordering::Relaxed);
        let clock = working.join().expect("it is disturbed");
        assert_eq!(counts(&lab.weights(run))[0], clock);
    });
}

#[test]
fn absurd_requests_disturb_no_worker() {
    within("an insult", || {
        let (lab, run) = (Lab::start(1, Transport::Tcp), counting("async", 2));
        undisturbed(&lab, &run, || {
            lab.client(&run, 0);
        });
        undisturbed(&lab, &run, || {
            let joins = text(&Request::Join { run: setup(&run, 1).fingerprint() }, &[]);
            let enters = text(&Request::Enter { clock: Clock(3) }, &[]);
            for (request, rest) in insults(&run) {
                // As a stranger, and as a member.
                insult(lab.knock(0, 1, 1), &text(&request, &rest));
                let words = [&joins[..], &enters, &text(&request, &rest)].concat();
                insult(lab.knock(0, 1, 1), &words);
            }
        });
    });
}

#[test]
fn absurd_requests_disturb_no_worker_in_lockstep() {
    within("an insult", || {
        let (lab, run) = (Lab::start(1, Transport::Tcp), counting("bsp", 1));
        undisturbed(&lab, &run, || {
            for (request, rest) in insults(&run) {
                // No other worker is of this run, so that none can stop it.
                insult(lab.knock(0, 1, 1), &text(&request, &rest));
            }
        });
    });
}

#[test]
fn noise_disturbs_no_worker() {
    within("noise", || {
        let (lab, run) = (Lab::start(1, Transport::Tcp), counting("async", 2));
        undisturbed(&lab, &run, || {
            for seed in 0..200 {
                let mut bytes = noise(seed, 300);
                if seed % 2 == 0 {
                    // A length that can be, so that the text is read.
                    bytes[..4].copy_from_slice(&(seed as u32).to_le_bytes());
                }
                insult(lab.knock(0, 1, 1), &bytes);
            }
            let mut endless = u32::MAX.to_le_bytes().to_vec();
            endless.extend(noise(0, 1000));
            insult(lab.knock(0, 1, 1), &endless);
        });
    });
}

/// A server that knows of no run yet, and is insulted first.
#[test]
fn absurd_setups_leave_room_for_a_good_one() {
    within("a setup", || {
        let (lab, run) = (Lab::start(1, Transport::Tcp), counting("async", 2));
        let good = setup(&run, 1);
        // A server without weights may be, if there are more servers than rows.
        let has_weights =
            |setup: &Setup| setup.pieces.iter().any(|piece| piece.checked_bytes() > 0);
        for absurd in absurd_setups(&good).into_iter().filter(has_weights) {
            // Weights are missing even for those that make sense.
            insult(lab.knock(0, 1, 1), &text(&Request::SetUp(Box::new(absurd)), &[]));
        }
        for (request, rest) in insults(&run) {
            if !matches!(request, Request::SetUp(_)) {
                insult(lab.knock(0, 1, 1), &text(&request, &rest));
            }
        }
        undisturbed(&lab, &run, || {});
    });
}

/// Worker 1, over a Unix socket.
fn knock_here(lab: &Lab) -> Socket {
    let introduction =
        Introduction { purpose: wire::SERVER, epoch: 1, group: 0, from: 1, to: 0, channel: 0 };
    let dialer = Dialer::new(&TOKEN, std::time::Instant::now() + HUNG);
    let target = unix_target(&TOKEN, &lab.addresses[0]);
    let socket = dialer.dial(target, introduction).unwrap().socket().try_clone().unwrap();
    socket.set_read_timeout(Some(HUNG)).unwrap();
    socket
}

/// A worker that goes on writing to common memory while the server reads it pushes something
/// unknown. But it is one thing: what is written down is what was applied.
#[test]
fn scribbling_into_a_push_harms_only_the_push() {
    const NUMBERS: usize = 1 << 18;
    const HALF: usize = 4 * NUMBERS;
    within("scribbling", || {
        let dir = tempfile::tempdir().unwrap();
        let files = Files { journal: Some(dir.path().join("journal")), ..Files::default() };
        let mut lab = Lab::idle(1, Transport::Auto);
        lab.serve(files.clone());
        let mut run = counting("async", 2);
        run.shapes = vec![vec![NUMBERS]];
        lab.client(&run, 0).leave();

        let file = memfd_create("scribbled", MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&file, 2 * HALF as u64).unwrap();
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW).unwrap();
        let memory = MmapOptions::new().len(2 * HALF).map_raw(&file).unwrap();
        let socket = knock_here(&lab);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let descriptors = [file.as_fd()];
        assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)));
        let size = (HALF as u64).to_le_bytes();
        sendmsg(&socket, &[IoSlice::new(&size)], &mut control, SendFlags::empty()).unwrap();
        // Only texts travel on the socket.
        let mut link = Link::over(socket);
        let join = Request::Join { run: setup(&run, 1).fingerprint() };
        assert!(matches!(call(&mut link, &join, &[]), Some(Reply::Joined { .. })));
        assert_eq!(
            call(&mut link, &Request::Enter { clock: Clock::START }, &[]),
            Some(Reply::Done)
        );

        let over = AtomicBool::new(false);
        let (words, over) = (memory.as_mut_ptr() as usize, &over);
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let mut value = 0u32;
                while !over.load(Ordering::Relaxed) {
                    value += 1;
                    for word in (0..NUMBERS).step_by(16) {
                        // SAFETY: within the mapping, which lives longer than this thread, and aligned.
                        let word = unsafe { AtomicU32::from_ptr((words + 4 * word) as *mut u32) };
                        word.store((value as f32).to_bits(), Ordering::Relaxed);
                    }
                }
            });
            for number in 1..=20 {
                let push = PushId { worker: 1, life: Life(1), number, clock: Clock(number - 1) };
                let part = Part { piece: 0, vectors: 1, bytes: HALF as u64, encoded: false };
                let request =
                    Request::Push { push, measured: Measured::default(), parts: vec![part] };
                let reply = call(&mut link, &request, &[]);
                assert!(matches!(reply, Some(Reply::Pushed { applied: true, .. })), "{reply:?}");
            }
            over.store(true, Ordering::Relaxed);
        });
        let bits =
            |weights: Vec<Vec<f32>>| weights[0].iter().map(|w| w.to_bits()).collect::<Vec<_>>();
        let before = bits(lab.weights(&run));
        assert!(before.iter().any(|weight| *weight != 0), "something was pushed");
        lab.servers[0] = None;
        lab.serve(files);
        assert!(bits(lab.weights(&run)) == before, "what was written down is not what was applied");
    });
}

/// Over a Unix socket: memory that is missing, too small for what is said to be in it, or not for the server to write to.
#[test]
fn bad_memory_disturbs_no_worker() {
    within("memory", || {
        let (lab, run) = (Lab::start(1, Transport::Auto), counting("async", 2));
        let knock = || knock_here(&lab);
        undisturbed(&lab, &run, || {
            insult(knock(), &[]);
            insult(knock(), &noise(1, 8));
            insult(knock(), &noise(2, 100));
            let (socket, memory) = (knock(), Memory::create_readable(8192).unwrap());
            send_with(&socket, &4096u64.to_le_bytes(), memory.file()).unwrap();
            let asks = Request::Weights { run: setup(&run, 1).fingerprint() };
            insult(socket, &text(&asks, &[]));
            let socket = knock();
            let mut link = Link::offer(socket.try_clone().unwrap(), 4096).unwrap();
            let large = Piece { parameter: 0, start: 0, shape: vec![1 << 20] };
            let large = Setup { pieces: vec![large], codecs: vec![None], ..setup(&run, 1) };
            link.send(&Request::SetUp(Box::new(large)), &[]).unwrap();
            insult(socket, &[]);
            for (request, _) in insults(&run) {
                let socket = knock();
                let mut link = Link::offer(socket.try_clone().unwrap(), 4096).unwrap();
                link.send(&request, &[]).unwrap();
                insult(socket, &[]);
            }
        });
    });
}
