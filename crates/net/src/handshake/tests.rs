//! The handshake without sockets: every split, every mutation, every stranger.

use proptest::prelude::*;

use super::wire::{CHALLENGE_LEN, HELLO_LEN, VERDICT_LEN};
use super::*;
use crate::TokenError;

const TOKEN: Token = Token::from_bytes([7; 32]);

const PURPOSES: &[Purpose] = &[Purpose::new(*b"data"), Purpose::new(*b"ctrl"), ANY];

fn introduction(seed: u32) -> Introduction {
    Introduction {
        purpose: PURPOSES[seed as usize % PURPOSES.len()],
        epoch: u64::from(seed) << 33,
        group: u64::from(seed).wrapping_mul(0x9e37_79b9_7f4a_7c15),
        from: seed,
        to: !seed,
        channel: seed >> 3,
    }
}

/// How a handshake over a perfect or meddled-with wire ended.
#[derive(Debug)]
struct Ending {
    initiator: Option<Result<(), HandshakeError>>,
    responder: Option<Result<Introduction, Refusal>>,
}

/// Runs both sides against each other. `meddle` may change each message (numbered 0 to 3) on its
/// way, and `split` says how large the next piece of it is.
fn converse(
    mut initiator: Initiator,
    mut responder: Responder,
    mut meddle: impl FnMut(usize, &mut Vec<u8>),
    mut split: impl FnMut() -> usize,
) -> Ending {
    let mut ending = Ending { initiator: None, responder: None };
    let mut to_responder = initiator.hello().to_vec();
    meddle(0, &mut to_responder);
    let mut number = 1;
    loop {
        let mut to_initiator = Vec::new();
        while !to_responder.is_empty() && responder.wanted() > 0 {
            let piece = split().clamp(1, to_responder.len());
            let (taken, step) = responder.feed(&to_responder[..piece]);
            to_responder.drain(..taken);
            match step {
                Step::More => {}
                Step::Send(reply) => to_initiator.extend_from_slice(reply.as_ref()),
                Step::Accepted { introduction, verdict } => {
                    to_initiator.extend_from_slice(verdict.as_ref());
                    ending.responder = Some(Ok(introduction));
                }
                Step::Refused { refusal, reply } => {
                    to_initiator.extend_from_slice(reply.as_ref());
                    ending.responder = Some(Err(refusal));
                }
            }
        }
        if to_initiator.is_empty() {
            return ending;
        }
        meddle(number, &mut to_initiator);
        number += 1;
        to_responder.clear();
        while !to_initiator.is_empty() && initiator.wanted() > 0 {
            let piece = split().clamp(1, to_initiator.len());
            let (taken, step) = initiator.feed(&to_initiator[..piece]);
            to_initiator.drain(..taken);
            match step {
                Ok(Initiated::More) => {}
                Ok(Initiated::Send(answer)) => to_responder.extend_from_slice(&answer),
                Ok(Initiated::Done) => ending.initiator = Some(Ok(())),
                Err(error) => ending.initiator = Some(Err(error)),
            }
        }
        if to_responder.is_empty() {
            return ending;
        }
        meddle(number, &mut to_responder);
        number += 1;
    }
}

fn pair(theirs: &Token, ours: &Token, seed: u32) -> (Initiator, Responder) {
    (Initiator::new(theirs, &introduction(seed), [1; 32]), Responder::new(ours, PURPOSES, [2; 32]))
}

proptest! {
    #[test]
    fn any_split_of_the_bytes_works(seed: u32, pieces in prop::collection::vec(1usize..128, 1..64)) {
        let (initiator, responder) = pair(&TOKEN, &TOKEN, seed);
        let mut pieces = pieces.into_iter().cycle();
        let ending = converse(initiator, responder, |_, _| {}, || pieces.next().unwrap_or(1));
        prop_assert!(matches!(ending.initiator, Some(Ok(()))));
        prop_assert_eq!(ending.responder, Some(Ok(introduction(seed))));
    }

    #[test]
    fn tokens_survive_hex(bytes: [u8; 32]) {
        let token = Token::from_bytes(bytes);
        prop_assert_eq!(token.to_hex().parse::<Token>(), Ok(token));
    }
}

#[test]
fn every_mutation_of_every_byte_is_noticed() {
    let lengths = [HELLO_LEN, CHALLENGE_LEN, 32, VERDICT_LEN];
    let mut mutations = 0;
    for (message, length) in lengths.into_iter().enumerate() {
        for position in 0..length {
            for flip in 1..=255u8 {
                let (initiator, responder) = pair(&TOKEN, &TOKEN, 3);
                let mut hit = false;
                let meddle = |number: usize, bytes: &mut Vec<u8>| {
                    if number == message {
                        assert_eq!(bytes.len(), length);
                        bytes[position] ^= flip;
                        hit = true;
                    }
                };
                let ending = converse(initiator, responder, meddle, || usize::MAX);
                assert!(hit);
                let agreed = matches!(ending.initiator, Some(Ok(())))
                    && matches!(ending.responder, Some(Ok(_)));
                assert!(!agreed, "message {message}, byte {position} ^ {flip}: {ending:?}");
                let responder_fooled = message != 3 && matches!(ending.responder, Some(Ok(_)));
                assert!(!responder_fooled, "message {message}, byte {position} ^ {flip}");
                mutations += 1;
            }
        }
    }
    assert_eq!(mutations, lengths.iter().sum::<usize>() * 255);
}

#[test]
fn garbage_neither_panics_nor_convinces() {
    let mut random = blake3::Hasher::new().update(b"garbage").finalize_xof();
    let mut buffer = [0; 256];
    for round in 0..300_000u32 {
        random.fill(&mut buffer);
        let length = buffer[255] as usize;
        // Two thirds of the inputs get past the first checks.
        if round % 3 > 0 {
            let hello = Initiator::new(&TOKEN, &introduction(round), [9; 32]).hello();
            let kept = if round % 3 == 1 { 12 } else { HELLO_LEN };
            buffer[..kept].copy_from_slice(&hello[..kept]);
        }
        let bytes = &buffer[..length];
        assert!(fuzz_responder(&TOKEN, [4; 32], bytes) <= HELLO_LEN + 32);
        assert!(fuzz_initiator(&TOKEN, [4; 32], bytes) <= CHALLENGE_LEN + VERDICT_LEN);

        let mut responder = Responder::new(&TOKEN, PURPOSES, [4; 32]);
        let (taken, _) = responder.feed(bytes);
        let (_, step) = responder.feed(&bytes[taken..]);
        assert!(!matches!(step, Step::Accepted { .. }));
    }
}

#[test]
fn strangers_are_told_apart() {
    let refusal = |bytes: &[u8]| match Responder::new(&TOKEN, PURPOSES, [2; 32]).feed(bytes).1 {
        Step::Refused { refusal, reply } => Some((refusal, reply.as_ref().len())),
        _ => None,
    };
    assert_eq!(refusal(b"GET / HTTP/1.1\r\n"), Some((Refusal::NotUnisono, 0)));
    assert_eq!(refusal(b"GET"), None);

    let mut hello = Initiator::new(&TOKEN, &introduction(1), [1; 32]).hello();
    hello[8] = 9;
    assert_eq!(refusal(&hello[..12]), Some((Refusal::Version { theirs: 9 }, 12)));

    let hello = Initiator::new(&Token::public("another"), &introduction(1), [1; 32]).hello();
    assert_eq!(refusal(&hello), Some((Refusal::OtherJob, 12)));

    let mut hello = Initiator::new(&TOKEN, &introduction(1), [1; 32]).hello();
    hello[10] = 1;
    assert_eq!(refusal(&hello), Some((Refusal::Malformed, 12)));

    let mut hello = Initiator::new(&TOKEN, &introduction(1), [1; 32]).hello();
    hello[60..64].copy_from_slice(b"else");
    let theirs = Purpose::new(*b"else");
    assert_eq!(refusal(&hello), Some((Refusal::OtherPurpose { theirs }, 12)));
}

#[test]
fn the_initiator_learns_why_it_was_refused() {
    let (initiator, responder) = pair(&Token::public("a"), &Token::public("b"), 1);
    let ending = converse(initiator, responder, |_, _| {}, || usize::MAX);
    assert!(matches!(ending.initiator, Some(Err(HandshakeError::OtherJob))), "{ending:?}");

    let (initiator, responder) = pair(&TOKEN, &TOKEN, 1);
    let corrupt = |number: usize, bytes: &mut Vec<u8>| bytes[0] ^= u8::from(number == 2);
    let ending = converse(initiator, responder, corrupt, || usize::MAX);
    assert!(matches!(ending.initiator, Some(Err(HandshakeError::ProofRejected))), "{ending:?}");
    assert_eq!(ending.responder, Some(Err(Refusal::BadProof)));
}

/// An attacker without the token bounces the proofs of the victim back at it.
#[test]
fn reflected_proofs_are_refused() {
    let victim = Initiator::new(&TOKEN, &introduction(1), [1; 32]);
    let mut as_responder = Responder::new(&TOKEN, PURPOSES, [1; 32]);
    let (_, step) = as_responder.feed(&victim.hello());
    let Step::Send(challenge) = step else { panic!("the hello is correct") };
    let (_, step) = as_responder.feed(&challenge.as_ref()[CHALLENGE_LEN - 32..]);
    assert!(matches!(step, Step::Refused { refusal: Refusal::BadProof, .. }));
}

#[test]
fn nothing_past_the_handshake_is_taken() {
    let (mut initiator, mut responder) = pair(&TOKEN, &TOKEN, 1);
    let Step::Send(challenge) = responder.feed(&initiator.hello()).1 else { panic!("refused") };
    let Ok(Initiated::Send(answer)) = initiator.feed(challenge.as_ref()).1 else { panic!("no") };
    let mut bytes = answer.to_vec();
    bytes.extend_from_slice(b"the first frame");
    let (taken, step) = responder.feed(&bytes);
    assert_eq!(taken, answer.len());
    assert!(matches!(step, Step::Accepted { .. }));
    assert_eq!(responder.wanted(), 0);
    assert_eq!(responder.feed(b"the first frame").0, 0);
}

#[test]
fn secrets_are_not_printed() {
    let token = Token::from_bytes([0xab; 32]);
    assert!(!format!("{token:?}").contains("ab"));
    assert_eq!("ab".repeat(32).parse::<Token>(), Ok(token));
    assert_eq!("ab".repeat(31).parse::<Token>(), Err(TokenError));
    assert_eq!("zz".repeat(32).parse::<Token>(), Err(TokenError));
    assert_ne!(Token::public("a"), Token::public("b"));
}

const ENCRYPTING: Token = TOKEN.with_encryption(true);

fn encrypted(initiator: Encryption, responder: Encryption) -> (Initiator, Responder) {
    let initiator = Initiator::with(&ENCRYPTING, &introduction(1), [1; 32], initiator);
    (initiator, Responder::with(&ENCRYPTING, PURPOSES, [2; 32], responder))
}

#[test]
fn both_sides_of_an_encrypted_connection_have_keys_and_no_others() {
    for encryption in [Encryption::Off, Encryption::Local, Encryption::On] {
        let (mut initiator, mut responder) = encrypted(encryption, encryption);
        let Step::Send(challenge) = responder.feed(&initiator.hello()).1 else { panic!("refused") };
        let Ok(Initiated::Send(answer)) = initiator.feed(&challenge).1 else { panic!("no proof") };
        let Step::Accepted { verdict, .. } = responder.feed(&answer).1 else { panic!("refused") };
        assert!(matches!(initiator.feed(&verdict).1, Ok(Initiated::Done)));
        let keys = (initiator.take_keys().is_some(), responder.take_keys().is_some());
        let expected = encryption == Encryption::On;
        assert_eq!(keys, (expected, expected));
    }
}

#[test]
fn sides_that_disagree_about_encryption_are_told_so() {
    use Encryption::*;
    for (ours, theirs) in [(Off, On), (On, Off), (Off, Local), (Local, Off)] {
        let (initiator, responder) = encrypted(ours, theirs);
        let ending = converse(initiator, responder, |_, _| {}, || 7);
        let Some(Err(HandshakeError::Encryption { theirs: said })) = ending.initiator else {
            panic!("{ending:?}");
        };
        assert_eq!(said, theirs != Off);
        assert_eq!(ending.responder, Some(Err(Refusal::Encryption { theirs: ours != Off })));
    }
}

/// No change of any byte is missed, and none makes two sides talk in the clear.
#[test]
fn every_change_of_an_encrypted_handshake_is_noticed() {
    let lengths = [HELLO_LEN, CHALLENGE_LEN, 32 + NOISE_LEN, VERDICT_LEN + NOISE_LEN];
    for (message, length) in lengths.into_iter().enumerate() {
        for position in 0..length {
            for flip in [1, 2, 3, 0x80] {
                let (initiator, responder) = encrypted(Encryption::On, Encryption::On);
                let meddle = |number: usize, bytes: &mut Vec<u8>| {
                    if number == message {
                        assert_eq!(bytes.len(), length);
                        bytes[position] ^= flip;
                    }
                };
                let ending = converse(initiator, responder, meddle, || usize::MAX);
                // The top bit of a public key means nothing, though it is part of what is authenticated.
                assert!(!matches!(ending.initiator, Some(Ok(()))), "{message} {position} {flip}");
                let fooled = message != 3 && matches!(ending.responder, Some(Ok(_)));
                assert!(!fooled, "message {message}, byte {position} ^ {flip}");
            }
        }
    }
}
