//! Both sides of the handshake, fed in two pieces.
//!
//! A third of the inputs start from what an honest peer sends, with the input's bytes laid over
//! it: a fuzzer does not guess proofs.
#![no_main]

use libfuzzer_sys::fuzz_target;
use unisono_net::Token;
use unisono_net::handshake::{
    ANY, Initiated, Initiator, Introduction, Responder, Step, fuzz_initiator, fuzz_responder,
};

fuzz_target!(|input: &[u8]| {
    let [mode, cut, bytes @ ..] = input else { return };
    let token: Token = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
        .parse()
        .expect("a token in hexadecimal");
    assert!(fuzz_responder(&token, [5; 32], bytes) <= bytes.len());
    assert!(fuzz_initiator(&token, [9; 32], bytes) <= bytes.len());

    let introduction =
        Introduction { purpose: ANY, epoch: 0, group: 0, from: 0, to: 1, channel: 0 };
    let mut initiator = Initiator::new(&token, &introduction, [9; 32]);
    let mut responder = Responder::new(&token, &[ANY], [5; 32]);
    let (hello, mut honest) = (initiator.hello(), true);
    let mut overlay = |message: &[u8], here: bool| {
        let mut message = message.to_vec();
        if here {
            for (byte, change) in message.iter_mut().zip(bytes) {
                honest &= *change == 0;
                *byte ^= change;
            }
        }
        message
    };
    let hello = overlay(&hello, mode % 3 == 0);
    let Some(challenge) = feed(&mut responder, &hello, *cut) else { return };
    let challenge = overlay(&challenge, mode % 3 == 1);
    let (_, answer) = initiator.feed(&challenge);
    let Ok(Initiated::Send(answer)) = answer else { return };
    let answer = overlay(&answer, mode % 3 == 2);
    let (_, step) = responder.feed(&answer);
    if let Step::Accepted { introduction: accepted, .. } = step {
        assert!(honest, "a changed handshake was accepted");
        assert_eq!(accepted, introduction);
    }
});

/// The responder's challenge, if the hello deserves one.
fn feed(responder: &mut Responder, hello: &[u8], cut: u8) -> Option<Vec<u8>> {
    let (first, rest) = hello.split_at(usize::from(cut).min(hello.len()));
    let mut reply = None;
    for piece in [first, rest] {
        let (taken, step) = responder.feed(piece);
        assert!(taken <= piece.len());
        match step {
            Step::Send(challenge) => reply = Some(challenge.as_ref().to_vec()),
            Step::Accepted { .. } => panic!("accepted without an answer"),
            Step::Refused { .. } => return None,
            Step::More => {}
        }
    }
    reply
}
