//! Requests to the nodes: which node, for how long, as which user, and what its answer means.

use std::io::{self, BufRead, BufReader};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use ureq::http::Response;
use ureq::{Agent, Body, Timeout};

use super::until::Ended;
use super::{Attempted, Endpoints, EtcdError, Password, Settings, Until, Versioned, wire};

/// How long a node may take to answer in the first rounds.
///
/// Larger, and a node that was stopped, or that has lost touch with the others, holds up a call for
/// longer before the next is asked: after the loss of the leader the others need an election (1 s by
/// default), and the first write should not come much later. Smaller, and a healthy etcd whose disk
/// or network is slow, or that has a password to check, is passed over and asked again, which makes it
/// slower still.
pub(super) const ATTEMPT: Duration = Duration::from_millis(400);

/// After this many rounds without an answer, the time for each attempt doubles from round to round: etcd
/// may be there, and slow.
const SHORT_ROUNDS: u32 = 3;

/// The longest time that an attempt may take.
const LONGEST_ATTEMPT: Duration = Duration::from_secs(2);

/// The pause after a round, so that nodes that refuse connections are not asked thousands of times.
const PAUSE: Duration = Duration::from_millis(50);

/// The longest answer that is read. etcd takes requests of at most 1.5 MiB, which are 2 MiB in base64.
const LONGEST_ANSWER: u64 = 4 << 20;

/// The longest text of another process that is repeated in an error, in characters.
const LONGEST_QUOTE: usize = 200;

/// The codes of gRPC that matter here.
mod code {
    pub const INVALID_ARGUMENT: u32 = 3;
    pub const PERMISSION_DENIED: u32 = 7;
    pub const RESOURCE_EXHAUSTED: u32 = 8;
    pub const FAILED_PRECONDITION: u32 = 9;
    pub const UNIMPLEMENTED: u32 = 12;
    pub const UNAUTHENTICATED: u32 = 16;
}

pub(super) struct Client {
    agent: Agent,
    nodes: Vec<Node>,
    /// The node that answered last.
    preferred: AtomicUsize,
    credentials: Option<(String, Password)>,
    /// What proves to etcd, for some minutes, that the credentials were right.
    token: Mutex<Option<Arc<str>>>,
}

struct Node {
    url: String,
    /// Whether its version is known to be a good one.
    is_checked: AtomicBool,
}

/// What a call brought.
pub(super) struct Reply<T> {
    pub answer: T,
    /// The number of the node that answered.
    pub node: usize,
    /// Whether an earlier attempt of this call may have been carried out as well.
    pub repeated: bool,
}

/// What a time of listening brought.
pub(super) enum Heard {
    Change(Versioned),
    Nothing,
    /// The node does not let us listen.
    Failure,
}

/// Why one attempt at one node failed.
struct Failure {
    /// Whether the node may have carried the request out.
    sent: bool,
    cause: Cause,
}

enum Cause {
    /// It may go better next time.
    Passing(String),
    /// It will not, at this node.
    Lasting(EtcdError),
    /// The token is missing, or etcd does not know it any more.
    Token(String),
}

impl Client {
    pub fn new(endpoints: &Endpoints, settings: &Settings) -> Result<Client, EtcdError> {
        let credentials = settings.credentials()?;
        if credentials.is_some() && endpoints.any_plain() {
            log::warn!("the password for etcd travels unencrypted to http:// URLs; use https://");
        }
        let config = Agent::config_builder()
            .tls_config(settings.tls()?)
            // Where etcd is was said exactly, and it is no web page.
            .proxy(None)
            .max_redirects(0)
            .http_status_as_error(false)
            .user_agent("unisono")
            .build();
        let node = |url| Node { url, is_checked: AtomicBool::new(false) };
        Ok(Client {
            agent: config.new_agent(),
            nodes: endpoints.urls().map(node).collect(),
            preferred: AtomicUsize::new(0),
            credentials,
            token: Mutex::new(None),
        })
    }

    pub fn endpoints(&self) -> Vec<&str> {
        self.nodes.iter().map(|node| &*node.url).collect()
    }

    /// Finds a node that answers, whose version is a good one, and that accepts the credentials.
    pub fn greet(&self, until: Until<'_>) -> Result<(), EtcdError> {
        let greet = |node: &Node, end| {
            self.check_version(node, end)?;
            self.current_token(node, end).map(|_| ())
        };
        self.in_turn(until, greet).map(|_| ()).map_err(EtcdError::of_a_read)
    }

    /// Posts a request to one node after the other until `understand` accepts an answer.
    pub fn call<A: DeserializeOwned, T>(
        &self,
        path: &str,
        body: &[u8],
        until: Until<'_>,
        understand: impl Fn(A) -> Result<T, String>,
    ) -> Result<Reply<T>, EtcdError> {
        self.in_turn(until, |node, end| {
            self.check_version(node, end)?;
            let answer = self.post_as_user(node, path, body, end)?;
            let answer = read_answer(node, answer)?;
            understand(answer).map_err(|reason| node.malformed(reason))
        })
    }

    /// Listens for one change of a key at or after revision `from`.
    ///
    /// A failure is not told from a silence that lasts as long: the caller reads the key again anyway.
    pub fn listen(&self, node: usize, key: &str, from: u64, time: Duration) -> Heard {
        let node = &self.nodes[node];
        let end = Instant::now() + time;
        let body = wire::watch(key, from);
        let listen = || -> Result<Heard, Failure> {
            let response = self.post_as_user(node, "/v3/watch", &body, end)?;
            let reader = response.into_body().into_with_config().limit(LONGEST_ANSWER).reader();
            let mut reader = BufReader::new(reader);
            let mut line = Vec::new();
            loop {
                line.clear();
                match reader.read_until(b'\n', &mut line) {
                    Ok(0) => return Ok(Heard::Failure),
                    Ok(_) => {}
                    Err(error) if Instant::now() < end => return Err(node.broken(error.into())),
                    Err(_) => return Ok(Heard::Nothing),
                }
                let watched = serde_json::from_slice(&line).map_err(|error| error.to_string());
                match watched.and_then(|watched: wire::Watched| watched.of(key)) {
                    Ok(None) => {}
                    Ok(Some(change)) => return Ok(Heard::Change(change)),
                    Err(reason) => return Err(node.malformed(reason)),
                }
            }
        };
        match listen() {
            Ok(heard) => heard,
            Err(_) if Instant::now() >= end => Heard::Nothing,
            Err(_) => Heard::Failure,
        }
    }

    /// Attempts something at one node after the other, beginning with the one that answered last, round
    /// after round, until it succeeds, time is over, or no node is left with which it could.
    fn in_turn<T>(
        &self,
        until: Until<'_>,
        attempt: impl Fn(&Node, Instant) -> Result<T, Failure>,
    ) -> Result<Reply<T>, EtcdError> {
        let mut causes: Vec<Option<Cause>> = self.nodes.iter().map(|_| None).collect();
        let mut repeated = false;
        for round in 0.. {
            let first = self.preferred.load(Ordering::Relaxed);
            for number in (0..self.nodes.len()).map(|offset| (first + offset) % self.nodes.len()) {
                let left = match until.left() {
                    Ok(left) => left,
                    Err(ended) => return Err(self.give_up(ended, &causes, repeated)),
                };
                let time = left.min(time_for_attempt(round));
                match attempt(&self.nodes[number], Instant::now() + time) {
                    Ok(answer) => {
                        self.preferred.store(number, Ordering::Relaxed);
                        return Ok(Reply { answer, node: number, repeated });
                    }
                    Err(Failure {
                        cause: Cause::Lasting(error @ EtcdError::Version { .. }),
                        ..
                    }) => {
                        // One such node is a danger to the data of all.
                        return Err(error);
                    }
                    Err(Failure { sent, cause }) => {
                        repeated |= sent;
                        // That the last attempt was cut short says less than the one before.
                        if time < left || causes[number].is_none() {
                            causes[number] = Some(cause);
                        }
                    }
                }
            }
            let lasting = |cause: &Option<Cause>| match cause {
                Some(Cause::Lasting(error)) => Some(error.clone()),
                _ => None,
            };
            if let Some(errors) = causes.iter().map(lasting).collect::<Option<Vec<_>>>() {
                return Err(errors.into_iter().next().expect("there is at least one endpoint"));
            }
            if let Err(ended) = until.pause(PAUSE) {
                return Err(self.give_up(ended, &causes, repeated));
            }
        }
        unreachable!("the rounds end with the time")
    }

    fn give_up(&self, ended: Ended, causes: &[Option<Cause>], maybe_written: bool) -> EtcdError {
        if ended == Ended::Aborted {
            return EtcdError::Aborted { maybe_written };
        }
        let attempted = |(node, cause): (&Node, &Option<Cause>)| {
            let reason = match cause.as_ref()? {
                Cause::Passing(reason) | Cause::Token(reason) => reason.clone(),
                Cause::Lasting(EtcdError::Refused { reason, .. }) => format!("refused: {reason}"),
                Cause::Lasting(EtcdError::Malformed { reason, .. }) => reason.clone(),
                Cause::Lasting(error) => error.to_string(),
            };
            Some(Attempted { endpoint: node.url.clone(), reason })
        };
        let attempts = self.nodes.iter().zip(causes).filter_map(attempted).collect();
        EtcdError::Unreachable { attempts, maybe_written }
    }

    fn check_version(&self, node: &Node, end: Instant) -> Result<(), Failure> {
        if node.is_checked.load(Ordering::Relaxed) {
            return Ok(());
        }
        let check = || {
            let request = self.agent.get(format!("{}/version", node.url));
            let request = request.config().timeout_global(Some(time_left(end))).build();
            let response = request.call().map_err(|error| node.broken(error))?;
            let response = expect_success(node, response)?;
            let wire::Version { etcdserver } = read_answer(node, response)?;
            judge_version(&node.url, &etcdserver)
                .map_err(|error| Failure { sent: false, cause: Cause::Lasting(error) })
        };
        check().map_err(unsent)?;
        node.is_checked.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Posts a request with a token, if there are credentials, and once more with a new token if etcd
    /// does not know the first any more.
    fn post_as_user(
        &self,
        node: &Node,
        path: &str,
        body: &[u8],
        end: Instant,
    ) -> Result<Response<Body>, Failure> {
        let token = self.current_token(node, end)?;
        match self.post(node, path, body, token.as_deref(), end) {
            Err(Failure { cause: Cause::Token(_), .. }) if self.credentials.is_some() => {
                let token = self.next_token(node, token, end)?;
                self.post(node, path, body, token.as_deref(), end)
            }
            Err(Failure { sent, cause: Cause::Token(reason) }) => {
                let reason = format!("{reason}; set UNISONO_ETCD_USER and UNISONO_ETCD_PASSWORD");
                Err(Failure { sent, cause: Cause::Lasting(node.refused(reason)) })
            }
            result => result,
        }
    }

    fn current_token(&self, node: &Node, end: Instant) -> Result<Option<Arc<str>>, Failure> {
        let token = self.token().clone();
        if token.is_some() { Ok(token) } else { self.next_token(node, None, end) }
    }

    /// The token that another thread has fetched since, or a new one.
    fn next_token(
        &self,
        node: &Node,
        last: Option<Arc<str>>,
        end: Instant,
    ) -> Result<Option<Arc<str>>, Failure> {
        let Some((user, password)) = &self.credentials else { return Ok(None) };
        let stored = self.token().clone();
        if stored != last {
            return Ok(stored);
        }
        let body = wire::authenticate(user, password.reveal());
        let response = match self.post(node, "/v3/auth/authenticate", &body, None, end) {
            Ok(response) => response,
            // etcd asks for no credentials, so that those that we have do no harm.
            Err(Failure { cause: Cause::Passing(reason), .. })
                if reason.contains("authentication is not enabled") =>
            {
                return Ok(None);
            }
            Err(failure) => return Err(unsent(failure)),
        };
        let wire::Token { token } = read_answer(node, response).map_err(unsent)?;
        if token.is_empty() || !token.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(unsent(node.malformed("the token is no text".to_owned())));
        }
        let token: Option<Arc<str>> = Some(token.into());
        self.token().clone_from(&token);
        Ok(token)
    }

    fn token(&self) -> MutexGuard<'_, Option<Arc<str>>> {
        self.token.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn post(
        &self,
        node: &Node,
        path: &str,
        body: &[u8],
        token: Option<&str>,
        end: Instant,
    ) -> Result<Response<Body>, Failure> {
        let mut request =
            self.agent.post(format!("{}{path}", node.url)).content_type("application/json");
        if let Some(token) = token {
            request = request.header("Authorization", token);
        }
        let request = request.config().timeout_global(Some(time_left(end))).build();
        let response = request.send(body).map_err(|error| node.broken(error))?;
        expect_success(node, response)
    }
}

impl Node {
    fn refused(&self, reason: String) -> EtcdError {
        EtcdError::Refused { endpoint: self.url.clone(), reason }
    }

    fn malformed(&self, reason: String) -> Failure {
        let error = EtcdError::Malformed { endpoint: self.url.clone(), reason };
        Failure { sent: true, cause: Cause::Lasting(error) }
    }

    /// What it means that a request did not get an answer.
    fn broken(&self, error: ureq::Error) -> Failure {
        use ureq::Error::{
            BodyExceedsLimit, ConnectionFailed, HostNotFound, Http, Io, LargeResponseHeader, Pem,
            Protocol, Rustls, Timeout as TimedOut, Tls,
        };
        let passing = |sent, reason: String| Failure { sent, cause: Cause::Passing(reason) };
        let refused = |reason: String| {
            Failure {
            sent: false,
            cause: Cause::Lasting(self.refused(format!(
                "TLS: {}; check the scheme of the URL, UNISONO_ETCD_CA, UNISONO_ETCD_CERT and UNISONO_ETCD_KEY",
                quote(&reason)
            ))),
        }
        };
        match error {
            TimedOut(Timeout::Resolve | Timeout::Connect) => {
                passing(false, "no connection in time".to_owned())
            }
            TimedOut(_) => passing(true, "no answer in time".to_owned()),
            HostNotFound => passing(false, "there is no host of that name".to_owned()),
            ConnectionFailed => passing(false, "no connection".to_owned()),
            Io(error) if error.kind() == io::ErrorKind::InvalidData => refused(error.to_string()),
            Io(error) if error.kind() == io::ErrorKind::UnexpectedEof => passing(
                true,
                "it closed the connection; is https:// or http:// the scheme of its URL?"
                    .to_owned(),
            ),
            Io(error) => passing(!never_connected(&error), error.to_string()),
            Tls(_) | Pem(_) | Rustls(_) => refused(error.to_string()),
            BodyExceedsLimit(_) => self.malformed("its answer is too long".to_owned()),
            Protocol(_) | LargeResponseHeader(..) | Http(_) => {
                self.malformed(quote(&error.to_string()))
            }
            other => passing(true, quote(&other.to_string())),
        }
    }
}

/// A request that came before the one that matters failed, so the latter was not sent.
fn unsent(failure: Failure) -> Failure {
    Failure { sent: false, ..failure }
}

fn never_connected(error: &io::Error) -> bool {
    use io::ErrorKind::{
        AddrNotAvailable, ConnectionRefused, HostUnreachable, NetworkDown, NetworkUnreachable,
    };
    matches!(
        error.kind(),
        AddrNotAvailable | ConnectionRefused | HostUnreachable | NetworkDown | NetworkUnreachable
    )
}

/// The response, if it is none of an error; otherwise what the error means.
fn expect_success(node: &Node, mut response: Response<Body>) -> Result<Response<Body>, Failure> {
    let status = response.status();
    if status.is_success() {
        return Ok(response);
    }
    let body = read_body(node, &mut response)?;
    let Ok(failed) = serde_json::from_slice::<wire::Failed>(&body) else {
        let reason = format!("{status}: {}", quote(&String::from_utf8_lossy(&body)));
        // Something between us and etcd may say that etcd is away for a while.
        return Err(match status.is_server_error() {
            true => Failure { sent: true, cause: Cause::Passing(reason) },
            false => node.malformed(reason),
        });
    };
    let text = if failed.error.is_empty() { &failed.message } else { &failed.error };
    let text = quote(text);
    // These are known by their text alone: the code of the second is that of every wrong request.
    let wants_token = failed.code == code::UNAUTHENTICATED
        || text.contains("user name is empty")
        || text.contains("revision of auth store is old");
    let lasts = [
        code::INVALID_ARGUMENT,
        code::PERMISSION_DENIED,
        // The value is too long, or the disk is full.
        code::RESOURCE_EXHAUSTED,
        code::UNIMPLEMENTED,
    ];
    let is_busy = text.contains("too many requests");
    Err(match failed.code {
        _ if wants_token => Failure { sent: false, cause: Cause::Token(text) },
        code if lasts.contains(&code) && !is_busy => {
            Failure { sent: false, cause: Cause::Lasting(node.refused(text)) }
        }
        // "not leader", and that authentication is not enabled.
        code::FAILED_PRECONDITION => Failure { sent: false, cause: Cause::Passing(text) },
        // "leader changed", "request timed out", "no leader": the write may be done all the same.
        _ => Failure { sent: true, cause: Cause::Passing(text) },
    })
}

/// The answer is not repeated in the error: it may hold a secret.
fn read_answer<T: DeserializeOwned>(
    node: &Node,
    mut response: Response<Body>,
) -> Result<T, Failure> {
    let body = read_body(node, &mut response)?;
    serde_json::from_slice(&body)
        .map_err(|error| node.malformed(format!("its answer is not that of etcd ({error})")))
}

fn read_body(node: &Node, response: &mut Response<Body>) -> Result<Vec<u8>, Failure> {
    let body = response.body_mut().with_config().limit(LONGEST_ANSWER);
    body.read_to_vec().map_err(|error| node.broken(error))
}

fn judge_version(url: &str, text: &str) -> Result<(), EtcdError> {
    let refuse = |reason| {
        let (endpoint, version) = (url.to_owned(), quote(text));
        Err(EtcdError::Version { endpoint, version, reason })
    };
    let number = text.split(['-', '+']).next().unwrap_or_default();
    let parts: Result<Vec<u32>, _> = number.split('.').map(str::parse).collect();
    match parts.as_deref() {
        Ok([3, 5, 0..=2]) => refuse("which can lose data"),
        Ok([3, minor, _]) if *minor >= 4 => Ok(()),
        _ => refuse("which this client does not know"),
    }
}

fn time_for_attempt(round: u32) -> Duration {
    let doublings = round.saturating_sub(SHORT_ROUNDS - 1).min(8);
    (ATTEMPT * (1 << doublings)).min(LONGEST_ATTEMPT)
}

/// At least a moment: for ureq, no time at all would be all the time there is.
fn time_left(end: Instant) -> Duration {
    end.saturating_duration_since(Instant::now()).max(Duration::from_millis(1))
}

/// A text of another process, short enough and without control characters.
fn quote(text: &str) -> String {
    let quoted: String = text.trim().chars().take(LONGEST_QUOTE).collect();
    quoted.chars().flat_map(|c| if c.is_control() { ' '..=' ' } else { c..=c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_that_lose_data_or_are_unknown_are_refused() {
        for good in ["3.4.0", "3.4.23", "3.5.3", "3.5.12", "3.6.0", "3.6.0-rc.1", "3.4.23+git"] {
            assert_eq!(judge_version("http://h1:2379", good), Ok(()), "{good}");
        }
        for bad in
            ["3.5.0", "3.5.1", "3.5.2", "3.5.2+git", "3.3.27", "2.3.8", "4.0.0", "3.5", "", "x\n"]
        {
            let error = judge_version("http://h1:2379", bad).unwrap_err();
            assert!(matches!(error, EtcdError::Version { .. }), "{bad}: {error}");
        }
        let error = judge_version("http://h1:2379", "3.5.1").unwrap_err().to_string();
        assert!(error.contains("http://h1:2379 is etcd 3.5.1, which can lose data"), "{error}");
    }

    #[test]
    fn attempts_become_longer_when_none_is_answered() {
        let millis: Vec<_> = (0..7).map(|round| time_for_attempt(round).as_millis()).collect();
        assert_eq!(millis, [400, 400, 400, 800, 1600, 2000, 2000]);
        assert_eq!(time_for_attempt(u32::MAX), LONGEST_ATTEMPT);
    }

    #[test]
    fn quotes_are_short_and_on_one_line() {
        assert_eq!(quote(" a\nb\u{1b}[31m "), "a b [31m");
        assert_eq!(quote(&"ä".repeat(1000)).chars().count(), LONGEST_QUOTE);
    }
}
