//! A job that encrypts: the same bits, and nothing of them on the wire.

use std::time::Duration;

use unisono_collective::fabric::{Address, Endpoint};
use unisono_collective::{Epoch, FormError, Group, Options, Rank, Reduction, Transport};
use unisono_net::Token;
use unisono_netlab::Wiretap;

const TOKEN: Token = Token::from_bytes([4; 32]);

/// Forms a group whose connections run over the tap, with these settings by rank.
fn form(tap: &Wiretap, options: &[Options]) -> Vec<Result<Group, FormError>> {
    let ip = "127.0.0.1".parse().unwrap();
    let endpoints: Vec<Endpoint> = options.iter().map(|_| Endpoint::bind(ip).unwrap()).collect();
    let tapped = |endpoint: &Endpoint| {
        let address = endpoint.address().clone();
        Address { tcp: tap.before(address.tcp).unwrap(), ..address }
    };
    let roster: Vec<Address> = endpoints.iter().map(tapped).collect();
    std::thread::scope(|scope| {
        let ranks: Vec<_> = endpoints
            .into_iter()
            .zip(options)
            .enumerate()
            .map(|(rank, (endpoint, options))| {
                let roster = roster.clone();
                scope.spawn(move || {
                    let token = TOKEN.with_encryption(options.encrypt);
                    let connector = endpoint.open(rank, token, roster.clone()).unwrap();
                    let (epoch, options) = (Epoch::new(0), options.clone());
                    Group::world(connector, epoch, rank, roster.len(), options)
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

fn over_tcp(encrypt: bool) -> Options {
    let mut options = Options::default();
    options.transport = Transport::Tcp;
    options.encrypt = encrypt;
    options
}

/// What each of three ranks gets from collectives and from messages, and whether the tap saw any of it.
fn exchange(encrypt: bool, streams: usize) -> (Vec<Vec<u32>>, bool) {
    let tap = Wiretap::default();
    let mut options = over_tcp(encrypt);
    options.streams = Some(streams);
    // Helpers encrypt, too.
    options.threads = Some(streams);
    let groups = form(&tap, &vec![options; 3]);
    let groups: Vec<Group> = groups.into_iter().map(|group| group.unwrap()).collect();
    let secret: Vec<f32> = (0..300_000).map(|i| 1.0 + i as f32 * 1e-3).collect();
    let results = std::thread::scope(|scope| {
        let rank = |group: &Group| -> Vec<u32> {
            let mut bits = Vec::new();
            for count in [1, 1000, secret.len()] {
                let mut gradient = secret[..count].to_vec();
                group.all_reduce(&mut gradient, Reduction::Mean).unwrap();
                bits.extend(gradient.iter().map(|value| value.to_bits()));
                let mut copy =
                    if group.rank() == 1 { secret.clone() } else { vec![0.0; secret.len()] };
                group.broadcast(&mut copy[..count], 1).unwrap();
                bits.extend(copy[..count].iter().map(|value| value.to_bits()));
            }
            let mut message = vec![0f32; secret.len()];
            match group.rank() {
                0 => group.send(&secret, 2, 7).unwrap(),
                2 => group.receive(&mut message, 0, 7).unwrap(),
                _ => {}
            }
            bits.extend(message.iter().map(|value| value.to_bits()));
            group.barrier().unwrap();
            bits
        };
        let threads: Vec<_> = groups.iter().map(|group| scope.spawn(move || rank(group))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
    });
    drop(groups);
    let known: Vec<u8> = secret[500..504].iter().flat_map(|value| value.to_le_bytes()).collect();
    (results, tap.shows(&known))
}

#[test]
fn the_bits_are_the_same_and_none_are_seen() {
    for streams in [1, 2] {
        let (clear, seen) = exchange(false, streams);
        assert!(seen, "the tap does not work");
        let (encrypted, seen) = exchange(true, streams);
        assert!(!seen, "the gradient was seen on the wire");
        assert!(clear == encrypted);
    }
}

#[test]
fn ranks_that_disagree_about_encryption_are_refused() {
    let (mut plain, mut encrypted) = (over_tcp(false), over_tcp(true));
    plain.timeout = Duration::from_secs(2);
    encrypted.timeout = Duration::from_secs(2);
    for (options, theirs) in
        [([plain.clone(), encrypted.clone()], false), ([encrypted, plain], true)]
    {
        let mut formed = form(&Wiretap::default(), &options);
        // The higher rank dials, and hears which of the two does what.
        let error = formed.pop().unwrap().err().unwrap();
        assert_eq!(error, FormError::Encryption { peer: Rank(0), theirs });
        assert!(error.to_string().contains("UNISONO_ENCRYPT"), "{error}");
        assert!(formed.pop().unwrap().is_err());
    }
}

/// Options that promise what the connections do not keep are an error.
#[test]
fn a_group_that_should_encrypt_over_connections_that_do_not_is_refused() {
    let ip = "127.0.0.1".parse().unwrap();
    let endpoint = Endpoint::bind(ip).unwrap();
    let roster = vec![endpoint.address().clone()];
    let connector = endpoint.open(0, TOKEN, roster).unwrap();
    let formed = Group::world(connector, Epoch::new(0), 0, 1, over_tcp(true));
    assert!(matches!(formed.err(), Some(FormError::System { what: "encryption", .. })));
}
