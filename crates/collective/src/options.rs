//! What a user can choose about a group.

use std::time::{Duration, Instant};

use crate::schedule::Algorithm;

/// The timeouts that the environment may ask for. A shorter one takes a busy host for dead, a longer
/// one is as good as none.
const SHORTEST_TIMEOUT: Duration = Duration::from_millis(50);
const LONGEST_TIMEOUT: Duration = Duration::from_secs(31_536_000);

/// How the ranks of a group exchange data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Transport {
    /// Shared memory between ranks of one host, TCP between hosts.
    #[default]
    Auto,
    /// Shared memory only; all ranks must be on one host.
    Shm,
    /// TCP only, also inside a host.
    Tcp,
}

impl Transport {
    /// The name used on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Transport::Auto => "auto",
            Transport::Shm => "shm",
            Transport::Tcp => "tcp",
        }
    }
}

impl std::fmt::Display for Transport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for Transport {
    type Err = String;
    fn from_str(s: &str) -> Result<Transport, String> {
        [Transport::Auto, Transport::Shm, Transport::Tcp]
            .into_iter()
            .find(|t| t.name() == s)
            .ok_or_else(|| format!("unknown transport {s:?}; expected auto, shm or tcp"))
    }
}

/// The settings of a group. Equal on all its ranks, but for those that say otherwise.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Options {
    /// How data travels.
    pub transport: Transport,
    /// Always use this algorithm; by default the cost model chooses.
    pub algorithm: Option<Algorithm>,
    /// Whether float reductions must have canonical bits. Without, ring and double binary tree
    /// may be chosen too.
    pub canonical: bool,
    /// A peer that is silent for this long is lost. Larger: a cut-off host is noticed later.
    /// Smaller: a host that swaps or is suspended for a moment is taken for dead.
    pub timeout: Duration,
    /// After how long a waiting operation says in the log for which ranks it waits.
    pub stall_after: Duration,
    /// Connections between two ranks for the long messages of large calls, half of them in each direction; with 1, there
    /// are none but the one for all calls. By default some where ranks have several threads for a call or hosts need them, and
    /// there are not too many ranks.
    pub streams: Option<usize>,
    /// Bytes of one segment, over all its blocks; by default chosen from the transport and the
    /// number of ranks. Larger: less overlap, more cache misses. Smaller: more synchronization.
    pub segment: Option<usize>,
    /// Bytes of shared staging memory per rank. Larger: bigger segments are possible. Smaller:
    /// less memory. With the default, many ranks of one host get less each.
    pub staging: usize,
    /// Whether everything that travels over TCP is encrypted, with keys that follow from the job's
    /// token, which must [say the same](unisono_net::Token::with_encryption).
    pub encrypt: bool,
    /// Threads of this rank that share the work of a large call, the one that runs it included; by default what
    /// is left of the host's cores, divided among its ranks, beside those that
    /// [compute](Options::computing); all of them while the program waits for a call; and not more than four. Need
    /// not be equal on all ranks. More: large calls are quicker while cores are idle. Fewer: they take less from what else the host does.
    pub threads: Option<usize>,
    /// Threads with which the program of this rank computes while calls run; unless known, as many as it has cores.
    /// Need not be equal on all ranks.
    pub computing: Option<usize>,
    /// The name of the region that the host of this rank is in: hosts with equal names have links to each other that are much
    /// faster than those to other hosts, and the group sends as little as it can between regions. That of the first rank of a
    /// host counts. If no rank names one, a group of up to 32 hosts finds out by itself which hosts are close together.
    pub region: Option<String>,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            transport: Transport::Auto,
            algorithm: None,
            canonical: true,
            timeout: Duration::from_secs(10),
            stall_after: Duration::from_secs(2),
            streams: None,
            segment: None,
            staging: Options::STAGING,
            encrypt: false,
            threads: None,
            computing: None,
            region: None,
        }
    }
}

impl Options {
    /// The default of [`Options::staging`].
    pub(crate) const STAGING: usize = 8 << 20;

    /// What must be equal on all ranks of a group, and the version of the protocol, as text: launchers that start
    /// ranks of one job compare it, so that a difference is told before a group fails to form.
    pub fn agreed(&self) -> String {
        let Options {
            transport,
            algorithm,
            canonical,
            timeout,
            stall_after: _,
            streams,
            segment,
            staging,
            encrypt,
            threads: _,
            computing: _,
            region: _,
        } = self;
        let algorithm = algorithm.map_or("auto".to_owned(), |algorithm| format!("{algorithm:?}"));
        let [segment, streams] =
            [segment, streams].map(|it| it.map_or("auto".to_owned(), |number| number.to_string()));
        let (version, timeout) = (unisono_net::handshake::VERSION, timeout.as_secs_f64());
        format!(
            "version {version} of the protocol, transport {transport:?}, algorithm {algorithm}, canonical \
             {canonical}, timeout {timeout} s, streams {streams}, segment {segment}, staging {staging}, encrypt \
             {encrypt}"
        )
    }

    /// The defaults, changed by the environment: `UNISONO_TRANSPORT`, `UNISONO_ALGORITHM`,
    /// `UNISONO_CANONICAL`, `UNISONO_TIMEOUT` (seconds), `UNISONO_STREAMS`, `UNISONO_SEGMENT`
    /// and `UNISONO_STAGING` (bytes, as [`parse_size`] reads them), `UNISONO_ENCRYPT`, `UNISONO_THREADS`, `UNISONO_REGION`.
    pub fn from_env() -> Result<Options, BadSetting> {
        Options::from_lookup(|name| std::env::var(name).ok())
    }

    /// As [`Options::from_env`], from any source of variables.
    pub fn from_lookup(lookup: impl Fn(&str) -> Option<String>) -> Result<Options, BadSetting> {
        fn parse<T>(
            name: &'static str,
            value: Option<String>,
            into: &mut T,
        ) -> Result<(), BadSetting>
        where
            T: std::str::FromStr,
            T::Err: std::fmt::Display,
        {
            let Some(value) = value.filter(|v| !v.is_empty()) else { return Ok(()) };
            *into = value.parse().map_err(|e: T::Err| BadSetting {
                name,
                value,
                reason: e.to_string(),
            })?;
            Ok(())
        }
        fn size(name: &'static str, value: Option<String>) -> Result<Option<usize>, BadSetting> {
            let Some(value) = value.filter(|v| !v.is_empty()) else { return Ok(None) };
            let bytes = parse_size(&value);
            bytes.map(Some).map_err(|reason| BadSetting { name, value, reason: reason.into() })
        }
        /// A number from 1 to 64, or none.
        fn few(name: &'static str, value: Option<String>) -> Result<Option<usize>, BadSetting> {
            let Some(value) = value.filter(|v| !v.is_empty() && v != "auto") else {
                return Ok(None);
            };
            match value.parse() {
                Ok(number) if (1..=64).contains(&number) => Ok(Some(number)),
                _ => Err(BadSetting { name, value, reason: "expected auto, or 1 to 64".into() }),
            }
        }
        let mut options = Options::default();
        parse("UNISONO_TRANSPORT", lookup("UNISONO_TRANSPORT"), &mut options.transport)?;
        if let Some(value) = lookup("UNISONO_ALGORITHM").filter(|v| !v.is_empty()) {
            let mut algorithm = Algorithm::Tree;
            parse("UNISONO_ALGORITHM", Some(value), &mut algorithm)?;
            options.algorithm = Some(algorithm);
        }
        parse("UNISONO_CANONICAL", lookup("UNISONO_CANONICAL"), &mut options.canonical)?;
        parse("UNISONO_ENCRYPT", lookup("UNISONO_ENCRYPT"), &mut options.encrypt)?;
        let mut timeout = options.timeout.as_secs_f64();
        parse("UNISONO_TIMEOUT", lookup("UNISONO_TIMEOUT"), &mut timeout)?;
        options.timeout = Duration::try_from_secs_f64(timeout)
            .ok()
            .filter(|t| (SHORTEST_TIMEOUT..=LONGEST_TIMEOUT).contains(t))
            .ok_or(BadSetting {
                name: "UNISONO_TIMEOUT",
                value: timeout.to_string(),
                reason: "expected seconds, from 0.05 to 31536000 (a year)".into(),
            })?;
        let bytes = |name| size(name, lookup(name));
        options.segment = bytes("UNISONO_SEGMENT")?;
        if options.segment == Some(0) {
            let (value, reason) = ("0".into(), "expected at least one byte".into());
            return Err(BadSetting { name: "UNISONO_SEGMENT", value, reason });
        }
        options.staging = bytes("UNISONO_STAGING")?.unwrap_or(options.staging);
        options.streams = few("UNISONO_STREAMS", lookup("UNISONO_STREAMS"))?;
        options.threads = few("UNISONO_THREADS", lookup("UNISONO_THREADS"))?;
        options.region = lookup("UNISONO_REGION").filter(|name| !name.is_empty());
        Ok(options)
    }

    /// The moment that many timeouts from now; far away if it is more than a clock can tell.
    pub fn deadline(&self, timeouts: u32) -> Instant {
        let wait = self.timeout.checked_mul(timeouts).unwrap_or(LONGEST_TIMEOUT);
        let now = Instant::now();
        now.checked_add(wait).unwrap_or_else(|| now + LONGEST_TIMEOUT)
    }

    /// A hash of the settings that must be equal on all ranks.
    pub(crate) fn fingerprint(&self) -> [u8; 32] {
        let agreed = Options { threads: None, computing: None, region: None, ..self.clone() };
        *blake3::hash(format!("{agreed:?}").as_bytes()).as_bytes()
    }
}

/// A setting that cannot be understood.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{name}={value}: {reason}")]
pub struct BadSetting {
    /// The variable.
    pub name: &'static str,
    /// Its value.
    pub value: String,
    /// What is wrong with it.
    pub reason: String,
}

/// Units of sizes.
const UNITS: [(&str, usize); 7] = [
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
    ("GB", 1_000_000_000),
    ("MB", 1_000_000),
    ("KB", 1_000),
    ("B", 1),
];

/// A size in bytes as people write it: `4096`, `64KiB`, `8 MB`. The error says what is wrong.
pub fn parse_size(text: &str) -> Result<usize, &'static str> {
    let text = text.trim();
    let (number, unit) = UNITS
        .iter()
        .find_map(|(name, unit)| text.strip_suffix(name).map(|number| (number, *unit)))
        .unwrap_or((text, 1));
    let number = number.trim();
    if number.is_empty() || !number.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err("expected a size, such as 65536, 64KiB or 8MiB");
    }
    let number: Option<usize> = number.parse().ok();
    number.and_then(|n| n.checked_mul(unit)).ok_or("the size is too large")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(name: &str, value: &str) -> Result<Options, BadSetting> {
        Options::from_lookup(|asked| (asked == name).then(|| value.to_owned()))
    }

    #[test]
    fn sizes_have_units() {
        assert_eq!(with("UNISONO_STAGING", "16MiB").unwrap().staging, 16 << 20);
        assert_eq!(with("UNISONO_STAGING", " 4096 ").unwrap().staging, 4096);
        assert_eq!(with("UNISONO_SEGMENT", "64 KB").unwrap().segment, Some(64_000));
        for wrong in ["8M", "MiB", "-1", "1e6", "99999999999999999999", "99999999999GiB"] {
            let error = with("UNISONO_STAGING", wrong).unwrap_err();
            assert!(error.to_string().contains(" size"), "{error}");
        }
    }

    #[test]
    fn streams_are_a_number_or_chosen() {
        assert_eq!(with("UNISONO_STREAMS", "auto").unwrap().streams, None);
        assert_eq!(with("UNISONO_STREAMS", "").unwrap().streams, None);
        assert_eq!(with("UNISONO_STREAMS", "4").unwrap().streams, Some(4));
        for bad in ["0", "65", "many"] {
            let error = with("UNISONO_STREAMS", bad).unwrap_err();
            assert_eq!(
                error.to_string(),
                format!("UNISONO_STREAMS={bad}: expected auto, or 1 to 64")
            );
        }
    }

    #[test]
    fn a_segment_of_nothing_is_refused() {
        assert!(with("UNISONO_SEGMENT", "0").is_err());
        assert_eq!(with("UNISONO_SEGMENT", "1").unwrap().segment, Some(1));
    }

    #[test]
    fn threads_and_regions_of_ranks_may_differ() {
        let threads = with("UNISONO_THREADS", "3").unwrap();
        assert_eq!(threads.threads, Some(3));
        let computing = Options { computing: Some(4), ..Options::default() };
        let region = with("UNISONO_REGION", "north").unwrap();
        assert_eq!(region.region.as_deref(), Some("north"));
        for options in [threads, computing, region] {
            assert_eq!(options.fingerprint(), Options::default().fingerprint());
            assert_eq!(options.agreed(), Options::default().agreed());
        }
        for wrong in ["0", "65", "-1", "two"] {
            assert!(with("UNISONO_THREADS", wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_timeout_that_no_clock_can_tell_is_refused() {
        assert_eq!(with("UNISONO_TIMEOUT", "2.5").unwrap().timeout, Duration::from_millis(2500));
        for wrong in ["1e19", "1e300", "inf", "NaN", "-1", "0"] {
            assert!(with("UNISONO_TIMEOUT", wrong).is_err(), "{wrong}");
        }
        let endless = Options { timeout: Duration::MAX, ..Options::default() };
        assert!(endless.deadline(6) > Instant::now());
    }
}
