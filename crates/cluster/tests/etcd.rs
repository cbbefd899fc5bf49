//! The client of etcd against real etcd, whose nodes are killed and stopped, whose answers are lost, and
//! whose place is taken by servers that are not etcd. Every wait ends by itself or by [`PATIENCE`].

use std::fmt::Debug;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use unisono_cluster::etcd::{Etcd, EtcdError, Password, Settings, Until, Versioned, Written};
use unisono_netlab::{EtcdCluster, EtcdOptions, etcd_or_skip};

/// How long anything may take before a test calls it hung.
const PATIENCE: Duration = Duration::from_secs(60);

const KEY: &str = "unisono/tests/epoch";

#[test]
fn a_write_is_done_if_and_only_if_the_key_is_as_expected() {
    let Some(cluster) = etcd_or_skip(1, EtcdOptions::default()) else { return };
    let etcd = connect(&cluster);
    assert_eq!(etcd.read(KEY, soon()), Ok(None));
    assert_eq!(etcd.write_if(KEY, 7, b"x", soon()), Ok(Written::Conflict(None)));

    let mut last = Versioned { value: Vec::new(), revision: 0 };
    for value in [b"first".to_vec(), Vec::new(), (0..=255).collect(), vec![0xff; 1 << 20]] {
        let revision = done(etcd.write_if(KEY, last.revision, &value, soon()));
        assert!(revision > last.revision);
        let conflict = etcd.write_if(KEY, last.revision, b"late", soon());
        last = Versioned { value, revision };
        assert_eq!(conflict, Ok(Written::Conflict(Some(last.clone()))));
        assert_eq!(etcd.read(KEY, soon()), Ok(Some(last.clone())));
    }
    // Equal bytes of another writer are not ours.
    let conflict = etcd.write_if(KEY, 0, &last.value, soon());
    assert_eq!(conflict, Ok(Written::Conflict(Some(last))));
    assert_eq!(etcd.read("unisono/tests/ep", soon()), Ok(None), "a prefix is another key");
    assert_eq!(etcd.read("schlüssel \"\\\n", soon()), Ok(None));

    for (length, expected) in [(1_700_000, "too large"), (2 << 20, "larger than max")] {
        let too_long = refused(etcd.write_if("long", 0, &vec![0; length], soon()));
        assert!(too_long.contains(expected), "{too_long}");
    }
}

#[test]
fn no_update_of_eight_threads_is_lost() {
    const THREADS: u64 = 8;
    const INCREMENTS: u64 = 50;
    let Some(cluster) = etcd_or_skip(3, EtcdOptions::default()) else { return };
    let etcd = connect(&cluster);
    let increment = || {
        let mut current = etcd.read(KEY, soon()).unwrap();
        loop {
            let (revision, count) = current.map_or((0, 0), |it| (it.revision, number(&it.value)));
            match etcd.write_if(KEY, revision, (count + 1).to_string().as_bytes(), soon()) {
                Ok(Written::Done { .. }) => return,
                Ok(Written::Conflict(other)) => current = other,
                Err(error) => panic!("{error}"),
            }
        }
    };
    thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| (0..INCREMENTS).for_each(|_| increment()));
        }
    });
    let last = etcd.read(KEY, soon()).unwrap().unwrap();
    assert_eq!(number(&last.value), THREADS * INCREMENTS);
}

#[test]
fn a_write_whose_answer_is_lost_is_done_once() {
    let Some(cluster) = etcd_or_skip(1, EtcdOptions::default()) else { return };
    let proxy = Proxy::before(cluster.client_address(0));
    let etcd = proxy.connect();
    let mut revision = done(etcd.write_if(KEY, 0, b"0", soon()));
    let losses = [Loss::AnswerClosed, Loss::AnswerSilent, Loss::RequestClosed, Loss::RequestSilent];
    for (count, loss) in losses.iter().cycle().take(12).enumerate() {
        let value = format!("written {count}");
        proxy.lose_next(*loss, || {});
        let next = done(etcd.write_if(KEY, revision, value.as_bytes(), soon()));
        assert_eq!(proxy.losses(), count + 1, "{loss:?} was not injected");
        assert_eq!(next, revision + 1, "{loss:?}: written more than once");
        let found = etcd.read(KEY, soon()).unwrap().unwrap();
        assert_eq!(found, Versioned { value: value.into_bytes(), revision: next }, "{loss:?}");
        revision = next;
    }
}

#[test]
fn a_write_whose_answer_is_lost_and_that_another_writer_replaced_is_a_conflict() {
    let Some(cluster) = etcd_or_skip(1, EtcdOptions::default()) else { return };
    let proxy = Proxy::before(cluster.client_address(0));
    let (etcd, other) = (proxy.connect(), Arc::new(connect(&cluster)));
    for loss in [Loss::AnswerClosed, Loss::RequestClosed] {
        let expected = etcd.read(KEY, soon()).unwrap().map_or(0, |it| it.revision);
        let other = Arc::clone(&other);
        proxy.lose_next(loss, move || {
            let seen = other.read(KEY, soon()).unwrap().map_or(0, |it| it.revision);
            done(other.write_if(KEY, seen, b"other", soon()));
        });
        let written = etcd.write_if(KEY, expected, format!("{loss:?}").as_bytes(), soon());
        let Ok(Written::Conflict(Some(current))) = written else { panic!("{written:?}") };
        assert_eq!(current.value, b"other", "{loss:?}");
    }
    assert_eq!(proxy.losses(), 2);
}

#[test]
fn a_write_that_cannot_be_settled_says_that_it_may_have_been_done() {
    let Some(mut cluster) = etcd_or_skip(1, EtcdOptions::default()) else { return };
    let proxy = Proxy::before(cluster.client_address(0));
    let etcd = proxy.connect();
    cluster.stop(0);
    let error = etcd.write_if(KEY, 0, b"late", Until::within(Duration::from_secs(1))).unwrap_err();
    let EtcdError::Unreachable { maybe_written: true, attempts } = &error else {
        panic!("{error:?}")
    };
    assert_eq!(attempts.len(), 1);
    assert!(error.to_string().contains("may have been done"), "{error}");
    // A node that is not there has done nothing.
    cluster.kill(0);
    let direct = connect_to(&proxy.address.to_string(), &Settings::default(), 1);
    assert!(matches!(direct, Err(EtcdError::Unreachable { maybe_written: false, .. })));
}

#[test]
fn writes_go_on_when_the_leader_is_killed() {
    let Some(mut cluster) = etcd_or_skip(3, EtcdOptions::default()) else { return };
    let etcd = connect(&cluster);
    let mut revision = 0;
    for round in 0..3 {
        for write in 0..5 {
            revision = done(etcd.write_if(KEY, revision, &[round, write], soon()));
        }
        let leader = cluster.leader().unwrap();
        cluster.kill(leader);
        let killed = Instant::now();
        revision = done(etcd.write_if(KEY, revision, b"after", soon()));
        println!("first write {} ms after the leader was killed", killed.elapsed().as_millis());
        assert_ne!(cluster.leader().unwrap(), leader);
        cluster.restart(leader).unwrap();
        cluster.wait_until_healthy(leader).unwrap();
    }
}

#[test]
fn writes_go_on_when_one_node_is_stopped() {
    let Some(cluster) = etcd_or_skip(3, EtcdOptions::default()) else { return };
    let etcd = connect(&cluster);
    let mut revision = 0;
    for node in 0..3 {
        cluster.stop(node);
        for write in 0..5 {
            revision = done(etcd.write_if(KEY, revision, &[node as u8, write], soon()));
        }
        cluster.cont(node);
        revision = done(etcd.write_if(KEY, revision, b"whole", soon()));
    }
    let leader = cluster.leader().unwrap();
    cluster.stop(leader);
    revision = done(etcd.write_if(KEY, revision, b"without its leader", soon()));
    cluster.cont(leader);
    done(etcd.write_if(KEY, revision, b"whole again", soon()));
}

#[test]
fn with_all_nodes_stopped_a_call_ends_in_time_and_later_ones_succeed() {
    let Some(cluster) = etcd_or_skip(3, EtcdOptions::default()) else { return };
    let etcd = connect(&cluster);
    let revision = done(etcd.write_if(KEY, 0, b"before", soon()));
    (0..3).for_each(|node| cluster.stop(node));

    let began = Instant::now();
    let time = Duration::from_secs(2);
    for result in [etcd.read(KEY, Until::within(time)), etcd.changed(KEY, 0, Until::within(time))] {
        let Err(EtcdError::Unreachable { attempts, maybe_written: false }) = result else {
            panic!("{result:?}")
        };
        let endpoints: Vec<_> = attempts.into_iter().map(|it| it.endpoint).collect();
        assert_eq!(endpoints.join(","), cluster.endpoints());
    }
    assert!(began.elapsed() < PATIENCE, "the calls did not end in time");

    let abort = AtomicBool::new(false);
    thread::scope(|scope| {
        let call = scope.spawn(|| etcd.read(KEY, soon().or_abort(&abort)));
        abort.store(true, Ordering::Release);
        let result = call.join().unwrap();
        assert_eq!(result, Err(EtcdError::Aborted { maybe_written: false }));
    });

    (0..3).for_each(|node| cluster.cont(node));
    done(etcd.write_if(KEY, revision, b"after", soon()));
}

#[test]
fn a_change_ends_the_wait_for_it() {
    let Some(mut cluster) = etcd_or_skip(3, EtcdOptions::default()) else { return };
    let etcd = connect(&cluster);
    let none = etcd.changed(KEY, 0, Until::within(Duration::from_millis(1500)));
    assert_eq!(none, Ok(None), "a key that does not exist has not changed");

    let mut revision = 0;
    for count in 0..6_u8 {
        let after = revision;
        revision = thread::scope(|scope| {
            let waiting = scope.spawn(|| etcd.changed(KEY, after, soon()));
            if count == 3 {
                cluster.kill(cluster.leader().unwrap());
            }
            // Longer than one round of listening, from time to time.
            thread::sleep(Duration::from_millis(u64::from(count % 3) * 400));
            let next = done(etcd.write_if(KEY, after, &[count], soon()));
            let expected = Versioned { value: vec![count], revision: next };
            assert_eq!(waiting.join().unwrap(), Ok(Some(expected)));
            next
        });
    }
    let current = etcd.changed(KEY, revision - 1, Until::within(PATIENCE)).unwrap().unwrap();
    assert_eq!(current.revision, revision, "a change that has happened is not waited for");
    let none = etcd.changed(KEY, revision, Until::within(Duration::from_millis(700)));
    assert_eq!(none, Ok(None));

    let abort = AtomicBool::new(false);
    thread::scope(|scope| {
        let waiting = scope.spawn(|| etcd.changed(KEY, revision, soon().or_abort(&abort)));
        thread::sleep(Duration::from_millis(100));
        abort.store(true, Ordering::Release);
        let result = waiting.join().unwrap();
        assert_eq!(result, Err(EtcdError::Aborted { maybe_written: false }));
    });
}

#[test]
fn a_change_is_heard_of_and_not_only_found_by_reading() {
    let Some(cluster) = etcd_or_skip(1, EtcdOptions::default()) else { return };
    let proxy = Proxy::before(cluster.client_address(0));
    let (etcd, writer) = (proxy.connect(), connect(&cluster));
    let mut revision = 0;
    // Whether a write falls into a time of listening is chance; that ten of them do not is none.
    let heard = (0..10_u8).any(|count| {
        let reads = || proxy.requests("/v3/kv/range");
        let (before, after) = (reads(), revision);
        let next = &mut revision;
        thread::scope(|scope| {
            let waiting = scope.spawn(|| etcd.changed(KEY, after, soon()));
            wait_for("the wait to begin", || reads() > before);
            thread::sleep(Duration::from_millis(100));
            let reads_before = reads();
            *next = done(writer.write_if(KEY, after, &[count], soon()));
            assert_eq!(waiting.join().unwrap().unwrap().unwrap().revision, *next);
            reads() == reads_before
        })
    });
    assert!(heard, "every change was found by reading");
}

#[test]
fn tls_is_checked_both_ways() {
    let options = EtcdOptions { tls: true, ..EtcdOptions::default() };
    let Some(cluster) = etcd_or_skip(1, options.clone()) else { return };
    let url = cluster.endpoint(0);
    let files = cluster.certificates().unwrap().clone();
    let ca = Settings { ca: Some(files.ca.clone()), ..Settings::default() };
    let right =
        Settings { cert: Some(files.cert.clone()), key: Some(files.key.clone()), ..ca.clone() };
    let etcd = connect_to(&url, &right, 60).unwrap();
    let revision = done(etcd.write_if(KEY, 0, b"sealed", soon()));
    assert_eq!(etcd.read(KEY, soon()).unwrap().unwrap().revision, revision);
    assert_eq!(etcd.changed(KEY, 0, soon()).unwrap().unwrap().revision, revision);
    let none = etcd.changed(KEY, revision, Until::within(Duration::from_millis(700)));
    assert_eq!(none, Ok(None));

    let no_certificate = refused(connect_to(&url, &ca, 60));
    assert!(no_certificate.contains("UNISONO_ETCD_CERT"), "{no_certificate}");
    let browsers = refused(connect_to(&url, &Settings { ca: None, ..right.clone() }, 60));
    assert!(browsers.contains("UNISONO_ETCD_CA"), "{browsers}");

    let other = EtcdCluster::start(1, options).unwrap();
    let others = other.certificates().unwrap();
    let wrong = Settings { ca: Some(others.ca.clone()), ..right.clone() };
    let wrong_authority = refused(connect_to(&url, &wrong, 60));
    assert!(wrong_authority.contains("UNISONO_ETCD_CA"), "{wrong_authority}");
    let wrong = Settings { key: Some(others.key.clone()), ..right.clone() };
    let error = connect_to(&url, &wrong, 60).unwrap_err();
    let expected = "UNISONO_ETCD_KEY";
    assert!(matches!(error, EtcdError::BadSetting { variable, .. } if variable == expected));
    let stranger = Settings {
        cert: Some(others.cert.clone()),
        key: Some(others.key.clone()),
        ca: Some(files.ca.clone()),
        ..Settings::default()
    };
    refused(connect_to(&url, &stranger, 60));

    let plain = url.replace("https", "http");
    let error = connect_to(&plain, &Settings::default(), 2).unwrap_err();
    assert!(error.to_string().contains("https://"), "{error}");
    // Its admin address has no TLS.
    let error = connect_to(&url.replace(":2379", ":2377"), &right, 2).unwrap_err();
    assert!(error.to_string().contains("scheme"), "{error}");
}

#[test]
fn users_are_known_by_their_passwords_and_tokens_are_renewed() {
    const SECRET: &str = "nine lives";
    let options = EtcdOptions {
        root_password: Some(SECRET.to_owned()),
        token_ttl: Some(1),
        ..EtcdOptions::default()
    };
    let Some(cluster) = etcd_or_skip(1, options) else { return };
    let user = |name: &str, password: &str| Settings {
        user: Some(name.to_owned()),
        password: Some(Password::new(password)),
        ..Settings::default()
    };
    let proxy = Proxy::before(cluster.client_address(0));
    let url = proxy.address.to_string();

    let nameless = connect_to(&url, &Settings::default(), 60).unwrap();
    let error = refused(nameless.read(KEY, soon()));
    assert!(error.contains("UNISONO_ETCD_USER"), "{error}");
    for (name, password) in [("root", "eight lives"), ("toor", SECRET)] {
        let error = connect_to(&url, &user(name, password), 60).unwrap_err();
        assert!(!format!("{error} {error:?}").contains(password), "{error}");
        let error = refused::<()>(Err(error));
        assert!(error.contains("invalid user ID or password"), "{error}");
    }

    let etcd = connect_to(&url, &user("root", SECRET), 60).unwrap();
    let mut revision = done(etcd.write_if(KEY, 0, b"root's", soon()));
    let authenticated = || proxy.requests("/v3/auth/authenticate");
    let before = authenticated();
    let mut pause = Duration::from_millis(1500);
    while authenticated() == before {
        assert!(pause < PATIENCE, "the token does not expire");
        thread::sleep(pause);
        pause *= 2;
        revision = done(etcd.write_if(KEY, revision, b"again", soon()));
    }
    let none = etcd.changed(KEY, revision, Until::within(Duration::from_secs(5)));
    assert_eq!(none, Ok(None));
}

#[test]
fn what_a_user_may_not_do_is_refused() {
    let Some(cluster) = etcd_or_skip(1, EtcdOptions::default()) else { return };
    let settings = Settings {
        user: Some("guest".to_owned()),
        password: Some(Password::new("g")),
        ..Settings::default()
    };
    // While etcd asks for no users, credentials do no harm, and they are used as soon as it does.
    let etcd = connect_to(&cluster.endpoint(0), &settings, 60).unwrap();
    done(etcd.write_if(KEY, 0, b"open", soon()));
    for (path, body) in [
        ("/v3/auth/user/add", r#"{"name":"root","password":"r"}"#),
        ("/v3/auth/user/add", r#"{"name":"guest","password":"g"}"#),
        ("/v3/auth/role/add", r#"{"name":"root"}"#),
        ("/v3/auth/user/grant", r#"{"user":"root","role":"root"}"#),
        ("/v3/auth/enable", "{}"),
    ] {
        cluster.post(0, path, body).unwrap();
    }
    let error = refused(etcd.read(KEY, soon()));
    assert!(error.contains("permission denied"), "{error}");
    refused(etcd.write_if(KEY, 0, b"closed", soon()));
}

#[test]
fn endpoints_that_are_no_etcd_are_passed_over_and_named_when_there_are_no_others() {
    let nonsense = [
        http("200 OK", "<html>hello</html>"),
        http("200 OK", ""),
        http("200 OK", "[]"),
        http("200 OK", r#"{"etcdserver":7}"#),
        http("404 Not Found", "no such page\r\n\x1b[31m"),
        http("302 Found\r\nLocation: http://127.0.0.1:1/", ""),
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n".to_vec(),
        vec![0xff; 100],
        [b"HTTP/1.1 200 OK\r\n".to_vec(), b"X: y\r\n".repeat(1 << 20)].concat(),
        http("200 OK", &format!(r#"{{"etcdserver":"{}"}}"#, "3".repeat(8 << 20))),
    ];
    for answer in nonsense {
        let server = fake(move |_| answer.clone());
        let error = connect_to(&server.to_string(), &Settings::default(), 60).unwrap_err();
        assert!(matches!(error, EtcdError::Malformed { .. }), "{error:?}");
        let text = error.to_string();
        assert!(text.contains(&server.to_string()) && text.len() < 1000, "{text}");
        assert!(!text.contains(['\n', '\x1b']), "{text:?}");

        let Some(cluster) = etcd_or_skip(1, EtcdOptions::default()) else { continue };
        let both = format!("{server},{}", cluster.endpoint(0));
        let etcd = connect_to(&both, &Settings::default(), 60).unwrap();
        done(etcd.write_if(KEY, 0, b"at the other", soon()));
    }
}

#[test]
fn wrong_answers_of_a_server_that_pretends_to_be_etcd_are_refused() {
    let header = r#""header":{"revision":"9"}"#;
    let long = "A".repeat(6 << 20);
    for answer in [
        "{}".to_owned(),
        r#"{"header":{"revision":"nine"}}"#.to_owned(),
        r#"{"header":{"revision":"99999999999999999999"}}"#.to_owned(),
        format!(r#"{{{header},"kvs":[{{"key":"other","mod_revision":"3"}}]}}"#),
        format!(r#"{{{header},"kvs":[{{"key":"b3RoZXI=","mod_revision":"3"}}]}}"#),
        format!(r#"{{{header},"kvs":[{{"key":"{long}","mod_revision":"3"}}]}}"#),
        format!("{}1", "[".repeat(1 << 20)),
    ] {
        let etcd = pretend_etcd(answer);
        let result = etcd.read(KEY, soon());
        assert!(matches!(result, Err(EtcdError::Malformed { .. })), "{result:?}");
    }
    for answer in [
        format!(r#"{{{header}}}"#),
        format!(r#"{{{header},"responses":[{{"response_put":{{}}}}]}}"#),
        format!(r#"{{{header},"succeeded":"yes"}}"#),
        r#"{"header":{"revision":"3"},"succeeded":true}"#.to_owned(),
    ] {
        let result = pretend_etcd(answer).write_if(KEY, 5, b"v", soon());
        assert!(matches!(result, Err(EtcdError::Malformed { .. })), "{result:?}");
    }
}

#[test]
fn an_etcd_that_loses_data_is_refused() {
    for version in ["3.5.0", "3.5.1", "3.5.2", "3.3.25"] {
        let body = format!(r#"{{"etcdserver":"{version}","etcdcluster":"3.5.0"}}"#);
        let server = fake(move |_| http("200 OK", &body));
        let error = connect_to(&server.to_string(), &Settings::default(), 60).unwrap_err();
        assert!(matches!(&error, EtcdError::Version { version: v, .. } if v == version), "{error}");
    }
}

#[test]
fn a_server_that_answers_too_slowly_or_with_errors_is_asked_until_time_is_over() {
    let unavailable = r#"{"error":"etcdserver: leader changed","code":14}"#.to_owned();
    for body in [unavailable, "<html>Bad Gateway</html>".to_owned()] {
        let asked = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&asked);
        let server = fake(move |request| match request.starts_with("GET /version") {
            true => http("200 OK", r#"{"etcdserver":"3.4.23"}"#),
            false => {
                count.fetch_add(1, Ordering::Relaxed);
                http("503 Service Unavailable", &body)
            }
        });
        let etcd = connect_to(&server.to_string(), &Settings::default(), 60).unwrap();
        let result = etcd.write_if(KEY, 0, b"v", Until::within(Duration::from_secs(1)));
        let Err(EtcdError::Unreachable { maybe_written: true, .. }) = result else {
            panic!("{result:?}")
        };
        assert!(asked.load(Ordering::Relaxed) > 1, "it was not asked again");
    }

    // One byte now and then keeps a connection alive, but not a call.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            thread::spawn(move || {
                let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n");
                while stream.write_all(b" ").is_ok() {
                    thread::sleep(Duration::from_millis(50));
                }
            });
        }
    });
    let result = connect_to(&address.to_string(), &Settings::default(), 2);
    assert!(matches!(result, Err(EtcdError::Unreachable { .. })), "{result:?}");
}

#[test]
fn endpoints_at_which_no_process_listens_are_named_with_the_reason() {
    let result = connect_to("127.0.0.1:1,[::1]:1", &Settings::default(), 1);
    let Err(EtcdError::Unreachable { attempts, maybe_written: false }) = result else {
        panic!("{result:?}")
    };
    assert_eq!(attempts.len(), 2);
    assert_eq!(attempts[0].endpoint, "http://127.0.0.1:1");
    assert!(attempts[0].reason.contains("refused"), "{attempts:?}");
}

fn connect(cluster: &EtcdCluster<'_>) -> Etcd {
    connect_to(&cluster.endpoints(), &Settings::default(), 60).unwrap()
}

fn connect_to(endpoints: &str, settings: &Settings, seconds: u64) -> Result<Etcd, EtcdError> {
    let until = Until::within(Duration::from_secs(seconds));
    Etcd::connect(&endpoints.parse().unwrap(), settings, until)
}

fn soon() -> Until<'static> {
    Until::within(PATIENCE)
}

fn done(written: Result<Written, EtcdError>) -> u64 {
    match written {
        Ok(Written::Done { revision }) => revision,
        other => panic!("not written: {other:?}"),
    }
}

/// Why etcd refused.
fn refused<T: Debug>(result: Result<T, EtcdError>) -> String {
    match result {
        Err(EtcdError::Refused { reason, .. }) => reason,
        other => panic!("not refused: {other:?}"),
    }
}

fn number(value: &[u8]) -> u64 {
    std::str::from_utf8(value).unwrap().parse().unwrap()
}

fn wait_for(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < deadline, "waited too long for {what}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// What is lost of a transaction, and what its sender sees: a closed connection, or nothing at all.
#[derive(Clone, Copy, Debug)]
enum Loss {
    AnswerClosed,
    AnswerSilent,
    RequestClosed,
    RequestSilent,
}

/// Passes on what arrives at an address, counts the requests, and loses one when told to.
struct Proxy {
    address: SocketAddr,
    state: Arc<ProxyState>,
}

#[derive(Default)]
struct ProxyState {
    seen: Mutex<Vec<u8>>,
    /// What to lose of the next transaction, and what to do then.
    armed: Mutex<Option<Armed>>,
    losses: AtomicUsize,
    /// Connections that are kept open so that their clients hear nothing.
    silent: Mutex<Vec<TcpStream>>,
}

type Armed = (Loss, Box<dyn FnOnce() + Send>);

impl Proxy {
    fn before(target: SocketAddr) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let state = Arc::new(ProxyState::default());
        let shared = Arc::clone(&state);
        thread::spawn(move || {
            for here in listener.incoming().flatten() {
                let Ok(there) = TcpStream::connect(target) else { continue };
                let state = Arc::clone(&shared);
                thread::spawn(move || state.pass(here, there));
            }
        });
        Proxy { address, state }
    }

    fn connect(&self) -> Etcd {
        connect_to(&self.address.to_string(), &Settings::default(), 60).unwrap()
    }

    fn lose_next(&self, loss: Loss, then: impl FnOnce() + Send + 'static) {
        *self.state.armed.lock().unwrap() = Some((loss, Box::new(then)));
    }

    fn losses(&self) -> usize {
        self.state.losses.load(Ordering::Acquire)
    }

    /// How many requests to this path were seen.
    fn requests(&self, path: &str) -> usize {
        let line = format!("POST {path} ");
        let seen = self.state.seen.lock().unwrap();
        seen.windows(line.len()).filter(|window| *window == line.as_bytes()).count()
    }
}

impl ProxyState {
    fn pass(self: Arc<Self>, mut here: TcpStream, mut there: TcpStream) {
        let (mut back, mut out) = (there.try_clone().unwrap(), here.try_clone().unwrap());
        let losing: Arc<Mutex<Option<Loss>>> = Arc::default();
        let (state, lost) = (Arc::clone(&self), Arc::clone(&losing));
        // The answers.
        thread::spawn(move || {
            let mut buffer = [0; 1 << 16];
            while let Ok(read @ 1..) = back.read(&mut buffer) {
                if let Some(loss) = lost.lock().unwrap().take() {
                    state.lose(loss, &out);
                    return;
                }
                if out.write_all(&buffer[..read]).is_err() {
                    break;
                }
            }
            let _ = out.shutdown(Shutdown::Both);
        });
        let mut buffer = [0; 1 << 16];
        while let Ok(read @ 1..) = here.read(&mut buffer) {
            let chunk = &buffer[..read];
            self.seen.lock().unwrap().extend_from_slice(chunk);
            if chunk.starts_with(b"POST /v3/kv/txn ") {
                let loss = self.armed.lock().unwrap().as_ref().map(|(loss, _)| *loss);
                match loss {
                    Some(Loss::RequestClosed | Loss::RequestSilent) => {
                        let _ = there.shutdown(Shutdown::Both);
                        return self.lose(loss.unwrap(), &here);
                    }
                    loss => *losing.lock().unwrap() = loss,
                }
            }
            if there.write_all(chunk).is_err() {
                break;
            }
        }
        let _ = there.shutdown(Shutdown::Both);
    }

    fn lose(&self, loss: Loss, client: &TcpStream) {
        let (_, then) = self.armed.lock().unwrap().take().unwrap();
        then();
        self.losses.fetch_add(1, Ordering::Release);
        match loss {
            Loss::AnswerClosed | Loss::RequestClosed => {
                let _ = client.shutdown(Shutdown::Both);
            }
            Loss::AnswerSilent | Loss::RequestSilent => {
                self.silent.lock().unwrap().push(client.try_clone().unwrap());
            }
        }
    }
}

fn http(status: &str, body: &str) -> Vec<u8> {
    let length = body.len();
    format!("HTTP/1.1 {status}\r\nContent-Length: {length}\r\n\r\n{body}").into_bytes()
}

/// A server that answers one request on each connection.
fn fake(answer: impl Fn(&str) -> Vec<u8> + Send + Sync + 'static) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let answer = Arc::new(answer);
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let answer = Arc::clone(&answer);
            thread::spawn(move || {
                let mut buffer = [0; 1 << 16];
                let read = stream.read(&mut buffer).unwrap_or(0);
                let _ = stream.write_all(&answer(&String::from_utf8_lossy(&buffer[..read])));
                let _ = stream.shutdown(Shutdown::Write);
                // Closed with bytes unread, the connection would be reset and the answer lost.
                while let Ok(1..) = stream.read(&mut buffer) {}
            });
        }
    });
    address
}

/// A client of a server that has the right version and gives one answer to all requests.
fn pretend_etcd(answer: String) -> Etcd {
    let server = fake(move |request| match request.starts_with("GET /version") {
        true => http("200 OK", r#"{"etcdserver":"3.4.23","etcdcluster":"3.4.0"}"#),
        false => http("200 OK", &answer),
    });
    connect_to(&server.to_string(), &Settings::default(), 60).unwrap()
}
