//! Ranks that do not mean the same, and calls that make no sense by themselves.

mod common;

use std::net::{IpAddr, Ipv4Addr};
use std::time::{Duration, Instant};

use common::{Kind, meet, on_all};
use unisono_collective::{
    Algorithm, Dtype, Error, FormError, Group, InvalidCall, Loss, Op, Options, Rank, Reduction,
    Request, Transport,
};

/// The default settings with a change.
fn settings(change: impl FnOnce(&mut Options)) -> Options {
    let mut options = Options::default();
    change(&mut options);
    options
}

/// A call with a root.
type Rooted = fn(&Group, usize) -> Result<(), Error>;

/// Every operation that has a root, with all buffers at hand on every rank.
const ROOTED: [Rooted; 4] = [
    |group, root| group.broadcast(&mut [1f32; 1000], root),
    |group, root| group.reduce_in_place(&mut [1f32; 1000], Reduction::Sum, root),
    |group, root| {
        let mut output = vec![0f32; 1000 * group.size()];
        group.gather(&[1f32; 1000], Some(&mut output), root)
    },
    |group, root| {
        let input = vec![1f32; 1000 * group.size()];
        group.scatter(Some(&input), &mut [0f32; 1000], root)
    },
];

/// Every rank hears of it, also those that agree with the root they send to.
fn assert_mismatch(groups: &[Group], call: Rooted, what: &str) {
    let last = groups.len() - 1;
    let outcomes = on_all(groups, |group| {
        let root = if group.rank() == last { last } else { 0 };
        call(group, root)
    });
    for (rank, outcome) in outcomes.into_iter().enumerate() {
        match outcome {
            Err(Error::Mismatch { rank: one, call, peer: other, peer_call, .. }) => {
                assert_eq!((call.seq, call.op.name()), (peer_call.seq, peer_call.op.name()));
                let roots = [(one, call), (other, peer_call)].map(|(rank, call)| {
                    (call.op.root(), Some(if rank.0 == last { last } else { 0 }))
                });
                assert!(roots.iter().all(|(named, own)| named == own), "{what}: {roots:?}");
            }
            other => panic!("{what}, rank {rank}: {other:?}"),
        }
    }
}

#[test]
fn ranks_that_name_different_roots_all_hear_of_it() {
    for kind in [Kind::Local, Kind::LocalHosts, Kind::Shm, Kind::Tcp] {
        for world in [2, 3, 5, 6] {
            for (i, call) in ROOTED.into_iter().enumerate() {
                let groups = kind.start(world, &Options::default());
                assert_mismatch(&groups, call, &format!("{kind:?}, {world} ranks, call {i}"));
            }
        }
    }
}

#[test]
fn no_algorithm_takes_different_roots() {
    for algorithm in [Algorithm::Tree, Algorithm::Pairwise, Algorithm::Direct] {
        for (i, call) in ROOTED.into_iter().enumerate() {
            let options = settings(|options| options.algorithm = Some(algorithm));
            let groups = Kind::Local.start(5, &options);
            assert_mismatch(&groups, call, &format!("{algorithm}, call {i}"));
        }
    }
}

/// All ranks of a host agree, and the hosts do not.
#[test]
fn hosts_that_name_different_roots_all_hear_of_it() {
    for hosts in [&[0, 0, 1, 1][..], &[0, 0, 0, 1, 2, 2]] {
        for call in &ROOTED[..2] {
            let options = settings(|options| options.algorithm = Some(Algorithm::Hierarchical));
            let groups = Group::local_on_hosts(hosts, &options).unwrap();
            let home = |host: u32| hosts.iter().position(|h| *h == host).unwrap();
            for outcome in on_all(&groups, |group| call(group, home(hosts[group.rank()]))) {
                assert!(matches!(outcome, Err(Error::Mismatch { .. })), "{hosts:?}: {outcome:?}");
            }
        }
    }
}

/// Lengths that no memory has must not become small by wrapping around.
#[test]
fn counts_that_wrap_are_refused() {
    let big = usize::MAX - 99;
    for kind in [Kind::Local, Kind::Tcp] {
        let groups = kind.start(2, &Options::default());
        on_all(&groups, |group| {
            let me = group.rank();
            let refused = |outcome: Result<(), Error>| {
                let length = matches!(
                    outcome,
                    Err(Error::InvalidCall(InvalidCall::Length { expected: usize::MAX, .. }))
                );
                assert!(length, "{outcome:?}");
            };
            // 2⁶⁴ − 100 and 200 make 100, if one does not look.
            let (input, mut output) = (vec![1i32; 100], vec![0i32; 100]);
            let counts = if me == 0 { [big, 200] } else { [200, big] };
            refused(group.all_to_all_unequal(&input, &counts, &mut output, &counts));
            let counts = if me == 0 { [6, usize::MAX] } else { [usize::MAX, 6] };
            refused(group.all_gather_unequal(&[7i32; 6], &mut [0i32; 5], &counts));
            let request = Request::sized(Op::AllReduce, Dtype::F32, usize::MAX / 2);
            let unexplained = group.explain(request).map(drop);
            assert!(matches!(unexplained, Err(Error::InvalidCall(_))), "{unexplained:?}");
            assert_eq!(output, vec![0; 100]);
            group.barrier().unwrap();
        });
    }
}

#[test]
fn different_settings_are_named_at_once() {
    let base = settings(|options| options.timeout = Duration::from_secs(60));
    let changes: [fn(&mut Options); 3] = [
        |options| options.streams = Some(3),
        |options| options.transport = Transport::Tcp,
        |options| options.canonical = false,
    ];
    for change in changes {
        let mut other = base.clone();
        change(&mut other);
        let start = Instant::now();
        let options = [base.clone(), base.clone(), other];
        let outcomes = meet(IpAddr::V4(Ipv4Addr::LOCALHOST), &options);
        let errors: Vec<FormError> = outcomes.into_iter().map(|o| o.err().unwrap()).collect();
        assert_eq!(errors[0], FormError::Settings { peer: Rank(2) });
        assert_eq!(errors[1], FormError::Settings { peer: Rank(2) });
        assert_eq!(errors[2], FormError::Settings { peer: Rank(0) });
        assert!(errors[0].to_string().contains("canonical"));
        assert!(start.elapsed() < base.timeout, "the ranks waited for each other");
    }
}

#[test]
fn a_call_on_a_group_that_ended_is_named() {
    for kind in [Kind::Local, Kind::Tcp] {
        let mut groups = kind.start(2, &Options::default());
        drop(groups.pop());
        let group = &groups[0];
        // The first notices, the second comes too late.
        for _ in 0..2 {
            let error = group.all_reduce(&mut [1f32; 10], Reduction::Max).unwrap_err();
            let Error::PeerLost { peer: Rank(1), loss: Loss::Left, during: Some(call) } = &error
            else {
                panic!("{error:?}")
            };
            assert_eq!((call.op, call.count), (Op::AllReduce, 10));
            assert!(error.to_string().contains("restart the job"), "{error}");
        }
    }
}

#[test]
fn a_barrier_that_cannot_be_done_is_called_a_barrier() {
    let hosts = [0, 1];
    let groups = Group::local_on_hosts(&hosts, &Options::default()).unwrap();
    let request = Request::barrier().with_algorithm(Algorithm::Window);
    let error = groups[0].run(request).unwrap_err();
    assert!(error.to_string().contains("cannot do barrier"), "{error}");
}

#[test]
fn an_explanation_names_every_algorithm_that_could() {
    let names = |groups: &[Group], op: Op| {
        let request = Request::sized(op, Dtype::F32, 1000);
        let explanation = groups[0].explain(request).unwrap();
        let list = |predictions: &[unisono_collective::cost::Prediction]| {
            assert!(predictions.windows(2).all(|pair| pair[0].seconds <= pair[1].seconds));
            let mut names: Vec<_> = predictions.iter().map(|p| p.algorithm.name()).collect();
            names.sort_unstable();
            names
        };
        (list(&explanation.candidates), list(&explanation.others))
    };
    let shared = Group::local(2, &Options::default()).unwrap();
    let (candidates, others) = names(&shared, Op::AllReduce);
    assert_eq!(candidates, ["window-direct"]);
    let links = ["direct", "halving-doubling", "pairwise", "recursive-doubling", "tree"];
    assert!(links.iter().all(|name| others.contains(name)), "{others:?}");
    assert!(others.contains(&"hierarchical") && others.contains(&"window"), "{others:?}");
    // Nothing is reduced, so even a ring gives the right bits.
    assert!(names(&shared, Op::AllGather).1.contains(&"ring"));
    let apart = Group::local_on_hosts(&[0, 1, 2], &Options::default()).unwrap();
    let (candidates, others) = names(&apart, Op::AllReduce);
    assert_eq!(candidates, links);
    assert_eq!(others, ["hierarchical"]);
}
