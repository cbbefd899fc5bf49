//! What encrypted connections carry: records.
//!
//! ```text
//!  0        2                      2 + length
//!  ┌────────┬──────────────────────┐
//!  │ length │ ciphertext, tag (16) │
//!  └────────┴──────────────────────┘
//! ```
//!
//! The keys of the two directions come out of a Noise handshake ([`Noise`]), which the two sides make part
//! of their own: pattern NNpsk0, so that the secret is fresh for every connection and forgotten with it,
//! and both have proven the token by it once more. Records are numbered, which is their nonce: none can be
//! changed, left out, repeated or moved. Both sides change the keys of a direction every [`REKEY`] records.
//!
//! A [`Seal`] turns bytes into records, an [`Open`] records into bytes. What they hold is bounded, whatever
//! the other side sends: up to [`BATCH`] records in each direction.

use std::io::{IoSlice, IoSliceMut};
use std::ops::Range;
use std::sync::{Arc, PoisonError, RwLock};

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use snow::{HandshakeState, StatelessTransportState};
use socket2::Socket;

use crate::token::Token;

/// AES-GCM is the fastest that processors have instructions for.
const PATTERN: &str = "Noise_NNpsk0_25519_AESGCM_SHA256";

/// Bytes of either message of the Noise handshake: a public key and a tag.
pub const NOISE_LEN: usize = 32 + TAG;

const TAG: usize = 16;

const HEADER: usize = 2;

/// The most bytes of a record before it is encrypted. Larger: more memory, and bytes are used later after
/// they arrive. Smaller: more tags, and more to do for each byte.
const RECORD: usize = 32 << 10;

/// Records that are encrypted before they are sent, and read before they are decrypted. More: they leave
/// the cache in between. Fewer: more system calls.
const BATCH: usize = 4;

/// A whole record.
const WHOLE: usize = HEADER + RECORD + TAG;

/// After how many records the key changes: 32 GiB of full ones. AES-GCM is safe for some hundred times as
/// many.
const REKEY: u64 = 1 << 20;

/// The first bytes to be read at once. More: connections that carry little take more memory.
const FIRST_READ: usize = 4 << 10;

/// One side of the Noise handshake of a connection.
pub struct Noise(HandshakeState);

impl Noise {
    /// The side that opened the connection, or the other. `context` is what both have said before.
    pub fn new(token: &Token, initiates: bool, context: &[&[u8]]) -> Option<Noise> {
        let (key, context) = (token.noise_key(), context.concat());
        let builder = snow::Builder::new(PATTERN.parse().ok()?);
        let builder = builder.psk(0, &key).ok()?.prologue(&context).ok()?;
        let state = match initiates {
            true => builder.build_initiator(),
            false => builder.build_responder(),
        };
        state.ok().map(Noise)
    }

    /// The message to send.
    pub fn write(&mut self) -> Option<[u8; NOISE_LEN]> {
        let mut message = [0; NOISE_LEN];
        (self.0.write_message(&[], &mut message).ok()? == NOISE_LEN).then_some(message)
    }

    /// Whether a message that was received is one of the same context, by a holder of the token.
    pub fn read(&mut self, message: &[u8]) -> bool {
        self.0.read_message(message, &mut []).is_ok()
    }

    /// The keys, once each side has sent its message.
    pub fn finish(self) -> Option<Keys> {
        let state = self.0.into_stateless_transport_mode().ok()?;
        Some(Keys(Arc::new(RwLock::new(state))))
    }
}

/// The keys of both directions of a connection.
#[derive(Clone)]
pub struct Keys(Arc<RwLock<StatelessTransportState>>);

impl Keys {
    /// The two halves that use them.
    pub fn split(self) -> (Box<Seal>, Box<Open>) {
        let seal =
            Seal { keys: self.clone(), number: 0, output: Vec::new(), sent: 0, gather: Vec::new() };
        let open = Open {
            keys: self,
            number: 0,
            input: Vec::new(),
            filled: 0..0,
            plain: Vec::new(),
            taken: 0,
        };
        (Box::new(seal), Box::new(open))
    }

    fn seal(&self, number: u64, plain: &[u8], into: &mut [u8]) -> Option<usize> {
        if number > 0 && number.is_multiple_of(REKEY) {
            self.0.write().unwrap_or_else(PoisonError::into_inner).rekey_outgoing();
        }
        let keys = self.0.read().unwrap_or_else(PoisonError::into_inner);
        keys.write_message(number, plain, into).ok()
    }

    fn open(&self, number: u64, record: &[u8], into: &mut [u8]) -> Option<usize> {
        if number > 0 && number.is_multiple_of(REKEY) {
            self.0.write().unwrap_or_else(PoisonError::into_inner).rekey_incoming();
        }
        let keys = self.0.read().unwrap_or_else(PoisonError::into_inner);
        keys.read_message(number, record, into).ok()
    }
}

/// Turns bytes into records.
pub struct Seal {
    keys: Keys,
    /// Of the next record.
    number: u64,
    /// Records on their way, and how many of their bytes were sent.
    output: Vec<u8>,
    sent: usize,
    /// The bytes of a record that come from several places.
    gather: Vec<u8>,
}

impl Seal {
    /// Takes some of the bytes and sends what the socket takes of their records. An error says that none
    /// were taken.
    pub fn send(
        &mut self,
        socket: &Socket,
        slices: &[IoSlice<'_>],
        flags: SendFlags,
    ) -> rustix::io::Result<usize> {
        self.flush(socket, flags)?;
        let (mut taken, mut rest) = (0, Rest { slices, skip: 0 });
        for _ in 0..BATCH {
            let plain = rest.next(&mut self.gather);
            if plain.is_empty() {
                break;
            }
            let start = self.output.len();
            self.output.resize(start + HEADER + plain.len() + TAG, 0);
            let record = &mut self.output[start..];
            let sealed = self.keys.seal(self.number, plain, &mut record[HEADER..]);
            let length =
                sealed.and_then(|length| u16::try_from(length).ok()).ok_or(Errno::PROTO)?;
            record[..HEADER].copy_from_slice(&length.to_le_bytes());
            self.number += 1;
            taken += plain.len();
        }
        match self.flush(socket, flags) {
            Ok(()) | Err(Errno::AGAIN | Errno::INTR) => Ok(taken),
            Err(error) => Err(error),
        }
    }

    /// Whether all that was taken was sent.
    pub fn is_flushed(&self) -> bool {
        self.output.is_empty()
    }

    /// Sends what was taken and not sent yet.
    pub fn flush(&mut self, socket: &Socket, flags: SendFlags) -> rustix::io::Result<()> {
        while self.sent < self.output.len() {
            self.sent += rustix::net::send(socket, &self.output[self.sent..], flags)?;
        }
        self.output.clear();
        self.sent = 0;
        Ok(())
    }
}

/// What is left of several slices.
struct Rest<'a, 'b> {
    slices: &'a [IoSlice<'b>],
    /// Bytes of the first that are not left.
    skip: usize,
}

impl<'a> Rest<'a, '_> {
    /// The bytes of the next record; collected in `gather` if they lie apart.
    fn next<'c>(&mut self, gather: &'c mut Vec<u8>) -> &'c [u8]
    where
        'a: 'c,
    {
        gather.clear();
        while let Some(slice) = self.slices.first() {
            let (slice, room) = (&slice[self.skip..], RECORD - gather.len());
            if gather.is_empty() && slice.len() >= room {
                self.skip += room;
                return &slice[..room];
            }
            let take = slice.len().min(room);
            gather.extend_from_slice(&slice[..take]);
            if take < slice.len() {
                self.skip += take;
                break;
            }
            (self.slices, self.skip) = (&self.slices[1..], 0);
        }
        gather
    }
}

/// Turns records into bytes.
pub struct Open {
    keys: Keys,
    /// Of the next record.
    number: u64,
    /// What was read and not decrypted yet.
    input: Vec<u8>,
    filled: Range<usize>,
    /// What was decrypted, and how many of its bytes were taken.
    plain: Vec<u8>,
    taken: usize,
}

impl Open {
    /// Receives some bytes; 0 if the other side has ended the connection.
    pub fn receive(
        &mut self,
        socket: &Socket,
        into: &mut [IoSliceMut<'_>],
        flags: RecvFlags,
    ) -> rustix::io::Result<usize> {
        loop {
            let mut received = 0;
            for into in into.iter_mut() {
                let taken = self.take(into)?;
                received += taken;
                if taken < into.len() {
                    break;
                }
            }
            if received > 0 || into.iter().all(|into| into.is_empty()) {
                return Ok(received);
            }
            if self.read(socket, flags)? == 0 {
                return Ok(0);
            }
        }
    }

    /// Copies the first bytes, which stay. Never waits.
    pub fn peek(&mut self, socket: &Socket, into: &mut [u8]) -> rustix::io::Result<usize> {
        let mut ended = false;
        while self.plain.len() - self.taken < into.len() && !ended {
            if !self.decrypt()? {
                match self.read(socket, RecvFlags::DONTWAIT) {
                    Ok(read) => ended = read == 0,
                    Err(Errno::AGAIN) if self.taken < self.plain.len() => break,
                    Err(error) => return Err(error),
                }
            }
        }
        let there = &self.plain[self.taken..];
        let copied = there.len().min(into.len());
        into[..copied].copy_from_slice(&there[..copied]);
        Ok(copied)
    }

    /// Whether bytes are here that the socket does not show.
    pub fn has_unread(&self) -> bool {
        self.taken < self.plain.len() || !matches!(self.record(), Ok(None))
    }

    /// Takes bytes that are here, as many as there are.
    fn take(&mut self, into: &mut [u8]) -> rustix::io::Result<usize> {
        let mut received = 0;
        while received < into.len() {
            if self.taken < self.plain.len() {
                let there = &self.plain[self.taken..];
                let copied = there.len().min(into.len() - received);
                into[received..received + copied].copy_from_slice(&there[..copied]);
                self.taken += copied;
                received += copied;
                continue;
            }
            let Some(record) = self.record()? else { break };
            // Straight to where it goes, if there is room for the tag as well, which is overwritten by
            // what comes next.
            if record.len() <= into.len() - received {
                let sealed = &self.input[record.clone()];
                let opened = self.keys.open(self.number, sealed, &mut into[received..]);
                received += opened.ok_or(Errno::BADMSG)?;
                self.pass(record);
            } else {
                self.decrypt()?;
            }
        }
        Ok(received)
    }

    /// Where the next record lies, if all of it is here.
    fn record(&self) -> rustix::io::Result<Option<Range<usize>>> {
        let here = &self.input[self.filled.clone()];
        let Some(header) = here.first_chunk::<HEADER>() else { return Ok(None) };
        let length = usize::from(u16::from_le_bytes(*header));
        if !(TAG..=RECORD + TAG).contains(&length) {
            return Err(Errno::BADMSG);
        }
        let start = self.filled.start + HEADER;
        Ok((here.len() >= HEADER + length).then_some(start..start + length))
    }

    fn pass(&mut self, record: Range<usize>) {
        self.number += 1;
        self.filled.start = record.end;
    }

    /// Decrypts the next record, if all of it is here.
    fn decrypt(&mut self) -> rustix::io::Result<bool> {
        let Some(record) = self.record()? else { return Ok(false) };
        self.plain.drain(..self.taken);
        self.taken = 0;
        let start = self.plain.len();
        self.plain.resize(start + record.len(), 0);
        let sealed = &self.input[record.clone()];
        let opened = self.keys.open(self.number, sealed, &mut self.plain[start..]);
        self.plain.truncate(start + opened.ok_or(Errno::BADMSG)?);
        self.pass(record);
        Ok(true)
    }

    /// Reads more of the records that come next; how many bytes.
    fn read(&mut self, socket: &Socket, flags: RecvFlags) -> rustix::io::Result<usize> {
        self.input.copy_within(self.filled.clone(), 0);
        self.filled = 0..self.filled.len();
        if self.filled.len() == self.input.len() {
            let size = (2 * self.input.len()).clamp(FIRST_READ, BATCH * WHOLE);
            self.input.resize(size, 0);
        }
        let (read, _) = rustix::net::recv(socket, &mut self.input[self.filled.end..], flags)?;
        self.filled.end += read;
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use socket2::{Domain, Type};

    fn keys(context: [&[u8]; 2], tokens: [[u8; 32]; 2]) -> Option<(Keys, Keys)> {
        let [mine, theirs] = tokens.map(Token::from_bytes);
        let mut initiator = Noise::new(&mine, true, &[context[0]])?;
        let mut responder = Noise::new(&theirs, false, &[context[1]])?;
        responder.read(&initiator.write()?).then_some(())?;
        initiator.read(&responder.write()?).then_some(())?;
        Some((initiator.finish()?, responder.finish()?))
    }

    fn pair() -> (Socket, Socket, Box<Seal>, Box<Open>) {
        let (here, there) = Socket::pair(Domain::UNIX, Type::STREAM, None).unwrap();
        here.set_nonblocking(true).unwrap();
        there.set_nonblocking(true).unwrap();
        let (mine, theirs) = keys([b"same"; 2], [[1; 32]; 2]).unwrap();
        (here, there, mine.split().0, theirs.split().1)
    }

    #[test]
    fn keys_need_the_same_token_and_the_same_context() {
        assert!(keys([b"a", b"a"], [[1; 32]; 2]).is_some());
        assert!(keys([b"a", b"b"], [[1; 32]; 2]).is_none());
        assert!(keys([b"a", b"a"], [[1; 32], [2; 32]]).is_none());
    }

    /// Everything arrives, whatever the sizes of slices, records and destinations, over a socket that
    /// takes and gives a little at a time.
    #[test]
    fn bytes_arrive_in_any_pieces() {
        let (here, there, mut seal, mut open) = pair();
        let sent: Vec<u8> = (0..3_000_000u32).map(|i| (i.wrapping_mul(i) >> 7) as u8).collect();
        let (mut taken, mut received) = (0, Vec::new());
        let mut size = 1;
        while received.len() < sent.len() {
            size = size * 7 % 200_003;
            let next = &sent[taken..sent.len().min(taken + size)];
            let (first, second) = next.split_at(next.len() / 3);
            let slices = [IoSlice::new(first), IoSlice::new(&[]), IoSlice::new(second)];
            match seal.send(&here, &slices, SendFlags::NOSIGNAL) {
                Ok(more) => taken += more,
                Err(error) => assert_eq!(error, Errno::AGAIN),
            }
            let (mut one, mut two) = (vec![0; size % 101], vec![0; size]);
            let mut into = [IoSliceMut::new(&mut one), IoSliceMut::new(&mut two)];
            match open.receive(&there, &mut into, RecvFlags::empty()) {
                Ok(more) => {
                    let first = more.min(one.len());
                    received.extend_from_slice(&one[..first]);
                    received.extend_from_slice(&two[..more - first]);
                }
                Err(error) => assert_eq!(error, Errno::AGAIN),
            }
        }
        assert!(received == sent);
        assert!(seal.is_flushed() && !open.has_unread());
        assert!(open.input.len() <= BATCH * WHOLE && seal.output.capacity() <= 2 * BATCH * WHOLE);
    }

    #[test]
    fn what_was_peeked_is_still_received() {
        let (here, there, mut seal, mut open) = pair();
        let mut start = [0; 4];
        assert_eq!(open.peek(&there, &mut start), Err(Errno::AGAIN));
        // A length that is split over records.
        for part in [&b"ab"[..], b"cd", b"ef"] {
            seal.send(&here, &[IoSlice::new(part)], SendFlags::NOSIGNAL).unwrap();
        }
        assert_eq!(open.peek(&there, &mut start), Ok(4));
        assert_eq!(&start, b"abcd");
        assert!(open.has_unread());
        let mut all = [0; 6];
        let mut into = [IoSliceMut::new(&mut all)];
        assert_eq!(open.receive(&there, &mut into, RecvFlags::empty()), Ok(6));
        assert_eq!(&all, b"abcdef");
        drop(here);
        assert_eq!(open.peek(&there, &mut start), Ok(0));
    }

    #[test]
    fn no_changed_repeated_or_missing_record_is_believed() {
        let records = |seal: &mut Seal, here: &Socket, there: &Socket| -> Vec<Vec<u8>> {
            let record = |text: &[u8]| {
                seal.send(here, &[IoSlice::new(text)], SendFlags::NOSIGNAL).unwrap();
                let mut bytes = vec![0; 100];
                let (read, _) =
                    rustix::net::recv(there, &mut bytes[..], RecvFlags::empty()).unwrap();
                bytes.truncate(read);
                bytes
            };
            [&b"one"[..], b"two", b"three"].map(record).to_vec()
        };
        let believed = |order: &dyn Fn(Vec<Vec<u8>>) -> Vec<Vec<u8>>| {
            let (here, there, mut seal, mut open) = pair();
            let bytes = order(records(&mut seal, &here, &there)).concat();
            rustix::net::send(&here, &bytes, SendFlags::NOSIGNAL).unwrap();
            let mut all = Vec::new();
            let mut some = [0; 64];
            loop {
                match open.receive(&there, &mut [IoSliceMut::new(&mut some)], RecvFlags::empty()) {
                    Ok(read) => all.extend_from_slice(&some[..read]),
                    Err(Errno::AGAIN) => return Some(all),
                    Err(_) => return None,
                }
            }
        };
        assert_eq!(believed(&|records| records).unwrap(), b"onetwothree");
        assert_eq!(believed(&|records| vec![records[1].clone()]), None);
        assert_eq!(believed(&|records| vec![records[0].clone(), records[0].clone()]), None);
        for byte in 0..21 {
            let change = |mut records: Vec<Vec<u8>>| {
                records[0][byte] ^= 1;
                records
            };
            // A changed length may announce more than ever comes, and is never acted on.
            assert_ne!(believed(&change).as_deref(), Some(&b"onetwothree"[..]), "{byte}");
        }
    }

    /// Both sides change keys at the same record, and go on.
    #[test]
    fn keys_change_and_the_bytes_go_on() {
        let (here, there, mut seal, mut open) = pair();
        (seal.number, open.number) = (REKEY - 2, REKEY - 2);
        for i in 0..5u8 {
            seal.send(&here, &[IoSlice::new(&[i])], SendFlags::NOSIGNAL).unwrap();
            let mut byte = [9];
            open.receive(&there, &mut [IoSliceMut::new(&mut byte)], RecvFlags::empty()).unwrap();
            assert_eq!(byte, [i]);
        }
    }
}
