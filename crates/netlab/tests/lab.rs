//! What a lab promises, on real namespaces. Every wait ends by itself or by [`PATIENCE`].

use std::collections::BTreeSet;
use std::env;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{IpAddr, TcpListener, TcpStream, UdpSocket};
use std::os::unix::process::ExitStatusExt;
use std::panic::{self, AssertUnwindSafe};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use unisono_netlab::{Fault, Host, Lab, LabError, Link, Rate, lab_or_skip, regions_or_skip};

/// How long anything may take before a test calls it hung.
const PATIENCE: Duration = Duration::from_secs(20);

const LINK: Link = Link::new(Rate::gbit(1));

#[test]
fn hosts_reach_each_other_over_both_protocols() {
    let Some(lab) = lab_or_skip(3, LINK) else { return };
    for (from, to) in [(0, 1), (1, 2), (2, 0)] {
        exchange(lab.host(from), lab.host(to), Host::address);
        exchange(lab.host(from), lab.host(to), Host::address_v6);
    }
}

#[test]
fn the_machine_sees_nothing_of_a_lab() {
    let devices = || -> BTreeSet<String> {
        let table = fs::read_to_string("/proc/thread-self/net/dev").unwrap();
        table.lines().filter_map(|line| Some(line.split_once(':')?.0.trim().to_owned())).collect()
    };
    let before = devices();
    let Some(lab) = lab_or_skip(2, LINK) else { return };
    assert_eq!(devices(), before);
    assert_eq!(lab.host(0).run(devices).unwrap(), ["eth0", "lo"].map(str::to_owned).into());
    assert_eq!(devices(), before, "the calling thread has not moved");
}

#[test]
fn a_command_is_the_program_and_runs_on_its_host() {
    let Some(lab) = lab_or_skip(2, LINK) else { return };
    let mut child = lab.host(1).command("cat").stdin(Stdio::piped()).spawn().unwrap();
    let program = fs::read_to_string(format!("/proc/{}/comm", child.id())).unwrap();
    assert_eq!(program.trim(), "cat");
    let on_host = |index: usize| namespace_of(&child) == name_of_namespace(lab.host(index));
    assert!(on_host(1) && !on_host(0));

    drop(child.stdin.take());
    assert!(child.wait().unwrap().success());
}

#[test]
fn a_panic_on_a_host_reaches_the_caller_and_ends_the_visit() {
    let Some(lab) = lab_or_skip(1, LINK) else { return };
    let panicking = || lab.host(0).run(|| panic!("as told"));
    let payload = panic::catch_unwind(AssertUnwindSafe(panicking)).unwrap_err();
    assert_eq!(payload.downcast_ref::<&str>(), Some(&"as told"));

    let mut child = idle(lab.host(0));
    assert_eq!(lab.host(0).kill().unwrap(), 1);
    assert_eq!(child.wait().unwrap().signal(), Some(9));
}

#[test]
fn a_cut_link_carries_nothing_until_it_is_healed() {
    let Some(lab) = lab_or_skip(3, LINK) else { return };
    let victim = lab.host(0);
    let [here, peer] = [0, 1].map(|index| datagram_socket(lab.host(index), Host::address));
    let target = here.local_addr().unwrap();
    // The peer now knows the way, so that what it sends during the cut does leave it.
    peer.send_to(b"before", target).unwrap();
    assert_eq!(receive(&here), b"before");

    victim.cut().unwrap();
    assert!(!victim.is_connected().unwrap());
    peer.send_to(b"during", target).unwrap();
    exchange(lab.host(1), lab.host(2), Host::address);
    assert_no_effect(victim.cut(), Fault::Cut);

    victim.heal().unwrap();
    assert!(victim.is_connected().unwrap());
    peer.send_to(b"after", target).unwrap();
    assert_eq!(receive(&here), b"after", "what was sent during the cut is lost");
    exchange(victim, lab.host(1), Host::address_v6);
    assert_no_effect(victim.heal(), Fault::Heal);
}

#[test]
fn a_network_that_is_split_in_two_carries_nothing_from_one_to_the_other() {
    let Some(lab) = lab_or_skip(5, LINK) else { return };
    let sockets: Vec<_> =
        lab.hosts().iter().map(|host| datagram_socket(host, Host::address)).collect();
    let passes = |from: usize, to: usize| {
        let target = sockets[to].local_addr().unwrap();
        sockets[from].send_to(&[from as u8], target).unwrap();
        receive(&sockets[to]) == [from as u8]
    };
    let vanishes = |from: usize, to: usize| {
        let target = sockets[to].local_addr().unwrap();
        sockets[from].send_to(b"lost", target).unwrap();
    };
    // All now know the way to each other, so that what they send while the network is split does leave them.
    for (from, to) in (0..5).flat_map(|from| (0..5).map(move |to| (from, to))) {
        assert!(from == to || passes(from, to));
    }

    lab.separate(&[0, 1]).unwrap();
    let again = lab.separate(&[1]);
    assert!(matches!(again, Err(LabError::NoEffect { fault: Fault::Separate, .. })), "{again:?}");
    // Had they arrived, they would be received in the place of what comes next.
    (2..5).for_each(|other| vanishes(0, other));
    (2..5).for_each(|other| vanishes(other, 1));
    assert!(passes(0, 1) && passes(1, 0) && passes(2, 3) && passes(3, 4) && passes(4, 2));

    lab.separate(&[2]).unwrap();
    vanishes(2, 3);
    assert!(passes(0, 2) && passes(2, 1) && passes(4, 3));

    lab.reunite().unwrap();
    assert!(passes(0, 3) && passes(4, 1) && passes(2, 4));
    let again = lab.reunite();
    assert!(matches!(again, Err(LabError::NoEffect { fault: Fault::Reunite, .. })), "{again:?}");
    // A second time, with the island that is left from the first.
    lab.separate(&[4]).unwrap();
    assert!(passes(0, 1));
    lab.reunite().unwrap();
    assert!(passes(4, 0));
}

#[test]
fn processes_of_a_host_are_counted() {
    let Some(lab) = lab_or_skip(2, LINK) else { return };
    assert_eq!(lab.host(0).processes().unwrap(), 0);
    let mut child = idle(lab.host(0));
    assert_eq!(lab.host(0).processes().unwrap(), 1);
    assert_eq!(lab.host(1).processes().unwrap(), 0);
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(lab.host(0).processes().unwrap(), 0);
}

#[test]
fn a_connection_outlives_a_cut() {
    let Some(lab) = lab_or_skip(2, LINK) else { return };
    let (mut sender, mut receiver) = connect(lab.host(0), lab.host(1), Host::address);
    lab.host(1).cut().unwrap();
    sender.write_all(b"patience").unwrap();
    lab.host(1).heal().unwrap();
    let mut received = [0; 8];
    receiver.read_exact(&mut received).unwrap();
    assert_eq!(&received, b"patience");
}

#[test]
fn a_kill_ends_every_process_of_one_host() {
    let Some(lab) = lab_or_skip(2, LINK) else { return };
    let [victim, bystander] = [0, 1].map(|index| lab.host(index));
    let mut survivor = idle(bystander);
    let mut single = idle(victim);
    // A shell with a stopped child: it answers no signal but the one.
    let mut family = victim
        .command("sh")
        .args(["-c", "sleep 60 & kill -STOP $!; echo ready; wait"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    BufReader::new(family.stdout.as_mut().unwrap()).read_line(&mut String::new()).unwrap();

    assert_eq!(victim.kill().unwrap(), 3);
    for child in [&mut single, &mut family] {
        let status = child.try_wait().unwrap().expect("the process is gone when kill returns");
        assert_eq!(status.signal(), Some(9));
    }
    assert!(survivor.try_wait().unwrap().is_none());
    assert_no_effect(victim.kill(), Fault::Kill);

    drop(lab);
    assert_eq!(survivor.wait().unwrap().signal(), Some(9));
}

#[test]
fn a_kill_that_would_spare_a_thread_is_refused() {
    let Some(lab) = lab_or_skip(1, LINK) else { return };
    let mut child = idle(lab.host(0));
    let refused = lab.host(0).run(|| lab.host(0).kill()).unwrap();
    assert_no_effect(refused, Fault::Kill);
    assert!(child.try_wait().unwrap().is_none());
}

#[test]
fn a_panic_leaves_nothing_behind() {
    let mut left = None;
    let panicking = || {
        let Some(lab) = lab_or_skip(2, LINK) else { return };
        let names: Vec<String> = lab.hosts().iter().map(|host| host.namespace().into()).collect();
        assert!(names.iter().all(|name| exists(name)));
        left = Some((names, idle(lab.host(0))));
        panic!("as told");
    };
    let result = panic::catch_unwind(AssertUnwindSafe(panicking));
    let Some((names, mut child)) = left else { return };
    assert!(result.is_err());
    assert!(!names.iter().any(|name| exists(name)));
    assert_eq!(child.wait().unwrap().signal(), Some(9));
}

/// Set in the process that [`a_killed_process_leaves_nothing_for_long`] starts and kills.
const DOOMED: &str = "UNISONO_NETLAB_TEST_DOOMED";

#[test]
fn a_killed_process_leaves_nothing_for_long() {
    if env::var_os(DOOMED).is_some() {
        return live_until_killed();
    }
    if lab_or_skip(1, LINK).is_none() {
        return;
    }
    let mut doomed = Command::new(env::current_exe().unwrap())
        .args(["--exact", "a_killed_process_leaves_nothing_for_long", "--nocapture"])
        .env(DOOMED, "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(doomed.stdout.as_mut().unwrap()).lines();
    let (namespace, orphan) = lines
        .map_while(Result::ok)
        .find_map(|line| {
            let mut words = line.strip_prefix("doomed ")?.split(' ').map(str::to_owned);
            Some((words.next()?, words.next()?))
        })
        .expect("the process says what it has made");
    let orphan = Path::new("/proc").join(orphan);

    drop(Lab::new(1, LINK).unwrap());
    assert!(exists(&namespace) && orphan.exists(), "a living process keeps what is its own");

    doomed.kill().unwrap();
    assert_eq!(doomed.wait().unwrap().signal(), Some(9));
    drop(Lab::new(1, LINK).unwrap());
    assert!(!exists(&namespace));
    // Dead, though the process that adopts orphans may not have reaped it yet.
    assert!(!orphan.join("ns/net").exists());
}

fn live_until_killed() {
    let lab = Lab::new(1, LINK).unwrap();
    let mut child = idle(lab.host(0));
    println!("\ndoomed {} {}", lab.host(0).namespace(), child.id());
    // Ends when the test that waits for the line above goes away without killing this process.
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
    drop(lab);
    child.wait().unwrap();
}

#[test]
fn a_delay_is_met_once_in_each_direction() {
    const DELAY: Duration = Duration::from_millis(20);
    let Some(lab) = lab_or_skip(2, LINK.with_delay(DELAY)) else { return };
    let [here, peer] = [0, 1].map(|index| datagram_socket(lab.host(index), Host::address));
    let target = peer.local_addr().unwrap();
    let round_trip = || {
        let start = Instant::now();
        here.send_to(b"ping", target).unwrap();
        assert_eq!(receive(&peer), b"ping");
        peer.send_to(b"pong", here.local_addr().unwrap()).unwrap();
        assert_eq!(receive(&here), b"pong");
        start.elapsed()
    };
    let shortest = (0..5).map(|_| round_trip()).min().unwrap();
    assert!(shortest >= 2 * DELAY, "{shortest:?}");
    assert!(shortest < 4 * DELAY, "the delay was met more than once: {shortest:?}");
}

#[test]
fn packets_are_lost_and_tcp_sends_them_again() {
    let link = LINK.with_delay(Duration::from_millis(1));
    let Some(lab) = lab_or_skip(2, link.with_loss(0.25)) else { return };
    let [here, peer] = [0, 1].map(|index| datagram_socket(lab.host(index), Host::address));
    // Until one comes: the first of all has to wait until the hosts know each other's addresses.
    peer.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
    let arrives = || {
        here.send_to(b"ping", peer.local_addr().unwrap()).unwrap();
        peer.recv(&mut [0; 64]).is_ok()
    };
    let found = (0..100).any(|_| arrives());
    assert!(found, "everything is lost");
    // Those that have waited come together.
    while peer.recv(&mut [0; 64]).is_ok() {}
    let arrived = (0..100).filter(|_| arrives()).count();
    assert!((50..97).contains(&arrived), "{arrived} of 100");
    exchange(lab.host(0), lab.host(1), Host::address);
}

#[test]
fn a_link_with_delay_can_be_cut() {
    let Some(lab) = lab_or_skip(2, LINK.with_delay(Duration::from_millis(2))) else { return };
    exchange(lab.host(0), lab.host(1), Host::address);
    lab.host(1).cut().unwrap();
    assert_no_effect(lab.host(1).cut(), Fault::Cut);
    lab.host(1).heal().unwrap();
    exchange(lab.host(0), lab.host(1), Host::address);
}

#[test]
fn one_connection_gets_the_rate_of_a_flow_and_four_get_more() {
    const FLOW: Rate = Rate::mbit(100);
    /// Most of a second at that rate.
    const BYTES: usize = 10 << 20;
    /// A busy machine may slow a transfer down, but nothing can make one too fast.
    const ATTEMPTS: usize = 5;
    let Some(lab) = lab_or_skip(2, LINK.with_flow_rate(FLOW)) else { return };
    // What so many connections together carry in a second, as a part of the rate of a flow.
    let carried = |connections: usize| {
        let pairs: Vec<_> =
            (0..connections).map(|_| connect(lab.host(0), lab.host(1), Host::address)).collect();
        let start = Instant::now();
        thread::scope(|scope| {
            for (sender, receiver) in pairs {
                scope.spawn(move || (&sender).write_all(&vec![0; BYTES]).unwrap());
                scope.spawn(move || {
                    let received = std::io::copy(&mut &receiver, &mut std::io::sink()).unwrap();
                    assert_eq!(received, BYTES as u64);
                });
            }
        });
        let bits = (connections * BYTES * 8) as f64 / start.elapsed().as_secs_f64();
        bits / FLOW.as_bits_per_second() as f64
    };
    let filled = (0..ATTEMPTS).any(|_| {
        let (one, four) = (carried(1), carried(4));
        println!("one connection {one:.3}, four {four:.3} of the rate of a flow");
        assert!(one <= 1.15 && four <= 4.0 * 1.15, "more than the rate: {one}, {four}");
        one >= 0.6 && four >= 2.5 * one
    });
    assert!(filled, "not once in {ATTEMPTS} attempts");
    // What has no limit passes through the same relay.
    exchange(lab.host(0), lab.host(1), Host::address_v6);
}

#[test]
fn what_the_kernel_refuses_is_unavailable() {
    // No queue holds a burst of this length.
    let impossible = LINK.with_burst(Duration::from_secs(1 << 40));
    let error = Lab::new(1, impossible).unwrap_err();
    assert!(matches!(error, LabError::Unavailable(_)), "{error}");
}

/// Sends a few bytes from one host to the other and back.
fn exchange(from: &Host, to: &Host, address: fn(&Host) -> IpAddr) {
    let (client, server) = connect(from, to, address);
    assert_eq!(server.peer_addr().unwrap().ip(), address(from));
    for (mut sender, mut receiver) in [(&client, &server), (&server, &client)] {
        sender.write_all(b"unisono").unwrap();
        let mut received = [0; 7];
        receiver.read_exact(&mut received).unwrap();
        assert_eq!(&received, b"unisono");
    }
}

fn connect(from: &Host, to: &Host, address: fn(&Host) -> IpAddr) -> (TcpStream, TcpStream) {
    let listener = to.run(|| TcpListener::bind((address(to), 0)).unwrap()).unwrap();
    let target = listener.local_addr().unwrap();
    let client = from.run(|| TcpStream::connect_timeout(&target, PATIENCE).unwrap()).unwrap();
    let (server, _) = listener.accept().unwrap();
    for stream in [&client, &server] {
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
    }
    (client, server)
}

fn datagram_socket(host: &Host, address: fn(&Host) -> IpAddr) -> UdpSocket {
    let socket = host.run(|| UdpSocket::bind((address(host), 0)).unwrap()).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    socket
}

fn receive(socket: &UdpSocket) -> Vec<u8> {
    let mut datagram = [0; 64];
    let length = socket.recv(&mut datagram).unwrap();
    datagram[..length].to_vec()
}

/// A process on `host` that does nothing until it is killed. If the test does not kill it, it ends after
/// a minute, and it holds no output open for which the test may wait.
fn idle(host: &Host) -> Child {
    let mut command = host.command("sleep");
    command.arg("60").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.spawn().unwrap()
}

fn namespace_of(child: &Child) -> String {
    let link = fs::read_link(format!("/proc/{}/ns/net", child.id())).unwrap();
    link.to_string_lossy().into_owned()
}

fn name_of_namespace(host: &Host) -> String {
    let link = host.run(|| fs::read_link("/proc/thread-self/ns/net").unwrap()).unwrap();
    link.to_string_lossy().into_owned()
}

fn exists(namespace: &str) -> bool {
    Path::new("/run/netns").join(namespace).exists()
}

fn assert_no_effect<T: std::fmt::Debug>(result: Result<T, LabError>, expected: Fault) {
    match result {
        Err(LabError::NoEffect { fault, .. }) => assert_eq!(fault, expected),
        other => panic!("{expected} should have had no effect: {other:?}"),
    }
}

#[test]
fn regions_are_close_inside_and_far_from_each_other() {
    const DELAY: Duration = Duration::from_millis(20);
    let between = Link::new(Rate::mbit(100)).with_delay(DELAY);
    let Some(lab) = regions_or_skip(&[2, 1], LINK, between) else { return };
    let shortest = |from: usize, to: usize| {
        let [here, peer] = [from, to].map(|index| datagram_socket(lab.host(index), Host::address));
        let round_trip = || {
            let start = Instant::now();
            here.send_to(b"ping", peer.local_addr().unwrap()).unwrap();
            assert_eq!(receive(&peer), b"ping");
            peer.send_to(b"pong", here.local_addr().unwrap()).unwrap();
            assert_eq!(receive(&here), b"pong");
            start.elapsed()
        };
        (0..5).map(|_| round_trip()).min().unwrap()
    };
    let (inside, out, back) = (shortest(0, 1), shortest(0, 2), shortest(2, 1));
    assert!(inside < DELAY, "{inside:?} inside a region");
    for between in [out, back] {
        assert!((2 * DELAY..4 * DELAY).contains(&between), "{between:?} between regions");
    }
    exchange(lab.host(0), lab.host(2), Host::address_v6);
}

#[test]
fn regions_without_delay_reach_each_other() {
    let Some(lab) = regions_or_skip(&[1, 1, 1], LINK, LINK) else { return };
    for (from, to) in [(0, 1), (1, 2), (2, 0)] {
        exchange(lab.host(from), lab.host(to), Host::address);
    }
}
