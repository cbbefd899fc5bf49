//! Worlds of ranks for tests, on every transport, and what their operations must give.
#![allow(dead_code, reason = "every test file uses another part")]

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use unisono_collective::fabric::{Address, Endpoint};
use unisono_collective::{Epoch, Error, FormError, Group, Options, Transport, Work};
use unisono_net::Token;

/// How the ranks of a test world are joined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Threads over socket pairs and shared mappings.
    Local,
    /// Threads that behave as if every two ranks shared a host.
    LocalHosts,
    /// Sealed memory passed over Unix sockets.
    Shm,
    /// TCP over IPv4 loopback.
    Tcp,
    /// TCP over IPv6 loopback.
    Tcp6,
}

impl Kind {
    pub const ALL: [Kind; 5] = [Kind::Local, Kind::LocalHosts, Kind::Shm, Kind::Tcp, Kind::Tcp6];

    /// Forms a world; all ranks live in this process.
    pub fn start(self, world: usize, options: &Options) -> Vec<Group> {
        let mut options = options.clone();
        match self {
            Kind::Local => Group::local(world, &options).expect("a local world forms"),
            Kind::LocalHosts => {
                let hosts: Vec<u32> = (0..world as u32).map(|r| r / 2).collect();
                Group::local_on_hosts(&hosts, &options).expect("a local world forms")
            }
            Kind::Shm => {
                options.transport = Transport::Shm;
                endpoints(world, IpAddr::V4(Ipv4Addr::LOCALHOST), &options)
            }
            Kind::Tcp => {
                options.transport = Transport::Tcp;
                endpoints(world, IpAddr::V4(Ipv4Addr::LOCALHOST), &options)
            }
            Kind::Tcp6 => {
                options.transport = Transport::Tcp;
                endpoints(world, IpAddr::V6(Ipv6Addr::LOCALHOST), &options)
            }
        }
    }
}

/// What takes longer than this hangs.
pub const PATIENCE: Duration = Duration::from_secs(20);

const KINDS: [Kind; 3] = [Kind::Local, Kind::Shm, Kind::Tcp];

/// Worlds of so many ranks, on the transports that differ most.
pub fn worlds(world: usize) -> impl Iterator<Item = Vec<Group>> {
    KINDS.into_iter().map(move |kind| kind.start(world, &Options::default()))
}

/// Tells whether a call of a rank waits for others; for a group whose waits nothing else stops.
pub struct Waits(Arc<AtomicUsize>);

impl Waits {
    pub fn of(group: &Group) -> Waits {
        let asked = Arc::new(AtomicUsize::new(0));
        let count = asked.clone();
        // A call that waits asks whether to go on, when it has noted for which ranks it waits.
        group.stop_waiting_if(move || {
            count.fetch_add(1, Ordering::SeqCst);
            false
        });
        Waits(asked)
    }

    /// Returns when a call waits that did not when this was called.
    pub fn begin(&self) {
        let before = self.0.load(Ordering::SeqCst);
        let deadline = Instant::now() + PATIENCE;
        while self.0.load(Ordering::SeqCst) == before {
            assert!(Instant::now() < deadline, "no call waits");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// The outcome of an operation that must not hang.
pub fn outcome(work: &Work) -> Result<(), Error> {
    work.wait_until(Instant::now() + PATIENCE).expect("the operation ends in time")
}

/// A world of ranks that meet over real sockets.
fn endpoints(world: usize, ip: IpAddr, options: &Options) -> Vec<Group> {
    let groups = meet(ip, &vec![options.clone(); world]);
    groups.into_iter().map(|group| group.expect("the world forms")).collect()
}

/// Ranks that meet over real sockets, each with its own settings.
pub fn meet(ip: IpAddr, options: &[Options]) -> Vec<Result<Group, FormError>> {
    let world = options.len();
    // As far as the system allows.
    let _ = unisono_net::descriptors::ensure(256 + 128 * world as u64);
    let token = Token::random().expect("randomness");
    let endpoints: Vec<Endpoint> =
        (0..world).map(|_| Endpoint::bind(ip).expect("loopback has a free port")).collect();
    let roster: Vec<Address> = endpoints.iter().map(|e| e.address().clone()).collect();
    std::thread::scope(|scope| {
        let ranks: Vec<_> = endpoints
            .into_iter()
            .enumerate()
            .map(|(rank, endpoint)| {
                let (token, roster) = (token.clone(), roster.clone());
                scope.spawn(move || {
                    let connector = endpoint.open(rank, token, roster).expect("an acceptor starts");
                    Group::world(connector, Epoch::new(0), rank, world, options[rank].clone())
                })
            })
            .collect();
        ranks.into_iter().map(|r| r.join().expect("no rank panics")).collect()
    })
}

/// Runs `body` on every rank at once; the results in rank order.
pub fn on_all<R: Send>(groups: &[Group], body: impl Fn(&Group) -> R + Sync) -> Vec<R> {
    std::thread::scope(|scope| {
        let body = &body;
        let ranks: Vec<_> = groups.iter().map(|g| scope.spawn(move || body(g))).collect();
        ranks.into_iter().map(|r| r.join().expect("no rank panics")).collect()
    })
}

/// A type with samples to reduce and a reference to compare with.
pub trait Sample: unisono_collective::Element + PartialEq + std::fmt::Debug {
    /// Reproducible values that round, overflow and cancel.
    fn samples(count: usize, seed: u64) -> Vec<Self>;
    /// One node of the canonical tree.
    fn combine(left: Self, right: Self, reduction: Reduction) -> Self;
    /// The division of a mean.
    fn divide(sum: Self, by: usize) -> Self;
    /// The value's bits; all NaNs alike.
    fn bits(self) -> u64;

    fn assert_same(actual: &[Self], expected: &[Self], what: &str) {
        assert_eq!(actual.len(), expected.len(), "{what}");
        for (i, (a, e)) in actual.iter().zip(expected).enumerate() {
            assert_eq!(a.bits(), e.bits(), "{what}: element {i} is {a:?}, expected {e:?}");
        }
    }
}

use unisono_collective::Reduction;

/// The reduction of all inputs in the canonical order.
pub fn reference<T: Sample>(inputs: &[Vec<T>], reduction: Reduction) -> Vec<T> {
    fn tree<T: Sample>(inputs: &[Vec<T>], i: usize, reduction: Reduction) -> T {
        match inputs.len() {
            1 => inputs[0][i],
            n => {
                let mut half = 1;
                while 2 * half < n {
                    half *= 2;
                }
                let (left, right) = inputs.split_at(half);
                T::combine(tree(left, i, reduction), tree(right, i, reduction), reduction)
            }
        }
    }
    let value = |i| {
        let value = tree(inputs, i, reduction);
        if reduction == Reduction::Mean { T::divide(value, inputs.len()) } else { value }
    };
    (0..inputs[0].len()).map(value).collect()
}

/// A small generator; its sequence is all that matters.
fn numbers(seed: u64) -> impl Iterator<Item = u64> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5851_f42d_4c95_7f2d;
    std::iter::repeat_with(move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    })
}

macro_rules! float_sample {
    ($t:ty, $wide:ty, $narrow:expr, $widen:expr, $bits:expr) => {
        impl Sample for $t {
            fn samples(count: usize, seed: u64) -> Vec<$t> {
                let value = |n: u64| {
                    let sign = if n & 1 == 0 { 1.0 } else { -1.0 };
                    let scale = <$wide>::powi(2.0, (n >> 1 & 7) as i32 - 3);
                    $narrow(sign * scale * (1.0 + (n >> 16) as $wide / (1u64 << 48) as $wide))
                };
                numbers(seed).take(count).map(value).collect()
            }
            fn combine(left: $t, right: $t, reduction: Reduction) -> $t {
                let (l, r): ($wide, $wide) = ($widen(left), $widen(right));
                match reduction {
                    Reduction::Sum | Reduction::Mean => $narrow(l + r),
                    Reduction::Product => $narrow(l * r),
                    Reduction::Min => {
                        if l <= r {
                            left
                        } else {
                            right
                        }
                    }
                    Reduction::Max => {
                        if l >= r {
                            left
                        } else {
                            right
                        }
                    }
                    _ => unreachable!("not for floats"),
                }
            }
            fn divide(sum: $t, by: usize) -> $t {
                $narrow($widen(sum) / by as $wide)
            }
            fn bits(self) -> u64 {
                $bits(self)
            }
        }
    };
}
float_sample!(f32, f32, |x: f32| x, |x: f32| x, |x: f32| u64::from(x.to_bits()));
float_sample!(f64, f64, |x: f64| x, |x: f64| x, |x: f64| x.to_bits());
float_sample!(half::f16, f32, half::f16::from_f32, half::f16::to_f32, |x: half::f16| u64::from(
    x.to_bits()
));
float_sample!(
    half::bf16,
    f32,
    half::bf16::from_f32,
    half::bf16::to_f32,
    |x: half::bf16| u64::from(x.to_bits())
);

macro_rules! integer_sample {
    ($($t:ty),*) => {$(
        impl Sample for $t {
            fn samples(count: usize, seed: u64) -> Vec<$t> {
                numbers(seed).take(count).map(|n| (n >> 11) as $t).collect()
            }
            fn combine(left: $t, right: $t, reduction: Reduction) -> $t {
                match reduction {
                    Reduction::Sum | Reduction::Mean => left.wrapping_add(right),
                    Reduction::Product => left.wrapping_mul(right),
                    Reduction::Min => left.min(right),
                    Reduction::Max => left.max(right),
                    Reduction::And => left & right,
                    Reduction::Or => left | right,
                    Reduction::Xor => left ^ right,
                }
            }
            fn divide(sum: $t, by: usize) -> $t {
                (i128::from(sum) / by as i128) as $t
            }
            fn bits(self) -> u64 {
                self as u64
            }
        }
    )*};
}
integer_sample!(i8, u8, i32, i64);
