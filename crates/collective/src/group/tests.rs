//! What only shows from inside a group.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::net::sockopt;
use socket2::Socket;
use unisono_net::Token;

use super::*;
use crate::Reduction;
use crate::error::Loss;
use crate::fabric::{Address, Endpoint};
use crate::options::Transport;

/// After this long, what has not happened never will.
const HUNG: Duration = Duration::from_secs(60);

/// A rank's connections for data, each with its peer.
type DataSockets = Vec<(usize, Arc<Socket>)>;

/// Ranks that meet over TCP, whether they have called or not, and their connections for data.
fn over_tcp(world: usize, options: &Options) -> (Vec<Group>, Vec<DataSockets>) {
    let token = Token::random().unwrap();
    let local = IpAddr::V4(Ipv4Addr::LOCALHOST);
    let endpoints: Vec<Endpoint> = (0..world).map(|_| Endpoint::bind(local).unwrap()).collect();
    let roster: Vec<Address> = endpoints.iter().map(|e| e.address().clone()).collect();
    let mut options = options.clone();
    options.transport = Transport::Tcp;
    std::thread::scope(|scope| {
        let form = |(rank, endpoint): (usize, Endpoint)| {
            let connector = endpoint.open(rank, token.clone(), roster.clone()).unwrap();
            let options = options.clone();
            scope.spawn(move || {
                let (tell, told) = std::sync::mpsc::channel();
                let tapped = move |host: HostEngine| {
                    tell.send(host.links.handles().collect()).unwrap();
                    Ok(Box::new(host) as Box<_>)
                };
                let (epoch, tapped) = (Epoch::new(0), Arc::new(tapped));
                let group = Group::with_engine(connector, epoch, rank, world, options, tapped);
                (group.unwrap(), told.recv().unwrap())
            })
        };
        let ranks: Vec<_> = endpoints.into_iter().enumerate().map(form).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

fn on_all(groups: &[Group], body: impl Fn(&Group) + Sync) {
    std::thread::scope(|scope| {
        for group in groups {
            let body = &body;
            scope.spawn(move || body(group));
        }
    });
}

/// From now on, the kernel drops whatever arrives for this socket, as if it had been lost on the way.
fn deafen(socket: &Socket) {
    let mut drop_all = libc::sock_filter { code: 0x06, jt: 0, jf: 0, k: 0 };
    let program = libc::sock_fprog { len: 1, filter: &raw mut drop_all };
    // SAFETY: the program is one instruction long and outlives the call.
    let outcome = unsafe {
        libc::setsockopt(
            std::os::fd::AsRawFd::as_raw_fd(socket),
            libc::SOL_SOCKET,
            libc::SO_ATTACH_FILTER,
            (&raw const program).cast(),
            size_of::<libc::sock_fprog>() as libc::socklen_t,
        )
    };
    assert_eq!(outcome, 0, "{}", std::io::Error::last_os_error());
}

#[test]
fn every_tcp_connection_is_kept_alive() {
    let tcp_sockets = || {
        let open = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
        let numbers = open.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        numbers.filter_map(|number: i32| {
            // SAFETY: only used to ask what it is, and a number that was closed since is no socket.
            let socket = unsafe { rustix::fd::BorrowedFd::borrow_raw(number) };
            let is_tcp = sockopt::socket_domain(socket) == Ok(rustix::net::AddressFamily::INET);
            let connected = is_tcp && rustix::net::getpeername(socket).is_ok();
            connected.then_some(socket)
        })
    };
    // Tests of one binary run in processes of their own, or this counts others' connections as well,
    // which are kept alive, too.
    let (groups, _) = over_tcp(3, &Options::default());
    let mut seen = 0;
    for socket in tcp_sockets() {
        assert_eq!(sockopt::socket_keepalive(socket), Ok(true));
        let idle = sockopt::tcp_keepidle(socket).unwrap();
        let interval = sockopt::tcp_keepintvl(socket).unwrap();
        let probes = sockopt::tcp_keepcnt(socket).unwrap();
        let all = idle + probes * interval;
        assert_eq!(all, Options::default().timeout, "{idle:?} + {probes} × {interval:?}");
        seen += 1;
    }
    // Both ends of a control and a data connection for every pair.
    assert!(seen >= 2 * 2 * 3, "{seen}");
    drop(groups);
}

/// Something on the way forgets the flow of data, and of nothing else, while it is idle.
#[test]
fn a_flow_that_is_dropped_while_it_is_idle_is_noticed() {
    let options = Options { timeout: Duration::from_secs(2), ..Options::default() };
    let (groups, data) = over_tcp(2, &options);
    for (_, socket) in data.iter().flatten() {
        deafen(socket);
    }
    // No rank sends: those that wait find out by the probes.
    let error = groups[0].broadcast(&mut [0u8; 1000], 1).unwrap_err();
    assert!(matches!(error, Error::PeerLost { peer: Rank(1), .. }), "{error:?}");
}

/// As before, and the next call sends at once.
#[test]
fn a_flow_that_is_dropped_while_data_is_on_its_way_is_noticed() {
    let options = Options { timeout: Duration::from_secs(2), ..Options::default() };
    let (groups, data) = over_tcp(2, &options);
    for (_, socket) in data.iter().flatten() {
        // Without the probes, which would find it out if they came before the data.
        socket.set_keepalive(false).unwrap();
        deafen(socket);
    }
    on_all(&groups, |group| {
        let error = group.all_reduce(&mut [1f32; 1000], Reduction::Sum).unwrap_err();
        let Error::PeerLost { peer, loss: Loss::Silent(_), .. } = error else {
            panic!("{error:?}");
        };
        // Who notices first tells the other.
        assert!(peer.0 < 2);
    });
}

/// A rank that computes for longer than the timeout reads nothing meanwhile; a rank that sends to it waits.
#[test]
fn a_rank_that_has_no_room_is_not_lost() {
    let options = Options { timeout: Duration::from_millis(500), ..Options::default() };
    let (groups, data) = over_tcp(2, &options);
    // More than the buffers of the connection hold.
    let mut sent = vec![7u8; 64 << 20];
    std::thread::scope(|scope| {
        let root = scope.spawn(|| groups[0].broadcast(&mut sent, 0));
        let (_, socket) = &data[1][0];
        // Full, and then for several timeouts: what the test is about takes time.
        let queued = || rustix::io::ioctl_fionread(socket).unwrap();
        let deadline = Instant::now() + HUNG;
        let mut before = 0;
        loop {
            let now = queued();
            assert!(Instant::now() < deadline, "the connection takes all there is");
            if now > 0 && now == before {
                break;
            }
            before = now;
            std::thread::sleep(Duration::from_millis(50));
        }
        std::thread::sleep(4 * options.timeout);
        assert!(!root.is_finished());
        assert_eq!(groups[0].failure(), None);
        let mut received = vec![0u8; 64 << 20];
        groups[1].broadcast(&mut received, 0).unwrap();
        root.join().unwrap().unwrap();
        assert!(received.iter().all(|&byte| byte == 7));
    });
}

#[test]
fn calls_go_on_after_the_last_number() {
    let groups = Group::local_on_hosts(&[0, 0, 1], &Options::default()).unwrap();
    for group in &groups {
        group.inner.state.skip_to(u32::MAX / 2 - 4);
    }
    let waits = Arc::new(AtomicUsize::new(0));
    let asked = waits.clone();
    groups[0].stop_waiting_if(move || {
        asked.fetch_add(1, Ordering::SeqCst);
        false
    });
    on_all(&groups, |group| {
        for i in 0..8 {
            // In the call with the last number, a rank waits for long enough to look which are there.
            let deadline = Instant::now() + HUNG;
            while group.rank() == 2 && i == 3 && waits.load(Ordering::SeqCst) == 0 {
                assert!(Instant::now() < deadline, "no call waits");
                std::thread::yield_now();
            }
            let mut sum = [i];
            group.all_reduce(&mut sum, Reduction::Sum).unwrap();
            assert_eq!(sum, [3 * i]);
        }
    });
    // And a rank that leaves after it has left.
    let mut groups = groups;
    drop(groups.pop());
    on_all(&groups, |group| {
        let error = group.barrier().unwrap_err();
        let Error::PeerLost { peer: Rank(2), loss: Loss::Left, .. } = error else {
            panic!("{error:?}")
        };
    });
}
