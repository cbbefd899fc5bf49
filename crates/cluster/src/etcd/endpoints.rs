use std::fmt;
use std::str::FromStr;

/// The port that etcd listens on for clients unless it is told another.
const PORT: u16 = 2379;

/// Where the nodes of an etcd cluster listen for clients: at least one URL.
///
/// Read from text such as `http://h1:2379,https://h2:2379`: the scheme is `http` and the port 2379
/// unless they are given.
///
/// ```
/// # use unisono_cluster::etcd::Endpoints;
/// let endpoints: Endpoints = "h1,https://h2:4001,[fd00::1]".parse()?;
/// assert_eq!(endpoints.to_string(), "http://h1:2379,https://h2:4001,http://[fd00::1]:2379");
/// # Ok::<(), unisono_cluster::etcd::BadEndpoints>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoints(Vec<Endpoint>);

impl Endpoints {
    pub(super) fn urls(&self) -> impl Iterator<Item = String> {
        self.0.iter().map(ToString::to_string)
    }

    /// Host and port of each.
    pub(crate) fn hosts(&self) -> impl Iterator<Item = (&str, u16)> {
        self.0.iter().map(|endpoint| (endpoint.host.trim_matches(['[', ']']), endpoint.port))
    }

    /// Whether a request to one of them travels unencrypted.
    pub(super) fn any_plain(&self) -> bool {
        self.0.iter().any(|endpoint| endpoint.scheme == "http")
    }
}

impl FromStr for Endpoints {
    type Err = BadEndpoints;

    fn from_str(text: &str) -> Result<Endpoints, BadEndpoints> {
        let parts = text.split(',').map(str::trim);
        let endpoints: Vec<_> = parts.map(Endpoint::parse).collect::<Result<_, _>>()?;
        match endpoints.iter().enumerate().find(|(at, it)| endpoints[..*at].contains(it)) {
            Some((_, twice)) => Err(BadEndpoints::Twice { url: twice.to_string() }),
            None => Ok(Endpoints(endpoints)),
        }
    }
}

impl fmt::Display for Endpoints {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.urls().collect::<Vec<_>>().join(","))
    }
}

/// Why a text does not say where etcd is.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BadEndpoints {
    /// The text, or the text between two commas, is empty.
    #[error("an etcd URL is empty; write one for each node, as in http://h1:2379,http://h2:2379")]
    Empty,
    /// One of the URLs cannot be used.
    #[error("the etcd URL `{url}` {problem}")]
    Url {
        /// The URL, without what precedes an `@`: that may be a password.
        url: String,
        /// What to change.
        problem: &'static str,
    },
    /// One URL is there two times.
    #[error("the etcd URL {url} is given twice; write one for each node")]
    Twice {
        /// That URL.
        url: String,
    },
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Endpoint {
    scheme: &'static str,
    /// A name, an IPv4 address, or an IPv6 address in brackets.
    host: String,
    port: u16,
}

impl Endpoint {
    fn parse(text: &str) -> Result<Endpoint, BadEndpoints> {
        if text.is_empty() {
            return Err(BadEndpoints::Empty);
        }
        if let Some((_, after)) = text.rsplit_once('@') {
            let problem = "holds a user; set UNISONO_ETCD_USER and UNISONO_ETCD_PASSWORD instead";
            return Err(BadEndpoints::Url { url: format!("…@{after}"), problem });
        }
        let bad = |problem| BadEndpoints::Url { url: text.to_owned(), problem };
        let (scheme, rest) = match text.split_once("://") {
            None => ("http", text),
            Some((scheme, rest)) if scheme.eq_ignore_ascii_case("http") => ("http", rest),
            Some((scheme, rest)) if scheme.eq_ignore_ascii_case("https") => ("https", rest),
            Some(_) => return Err(bad("has an unknown scheme; write http:// or https://")),
        };
        let rest = rest.strip_suffix('/').unwrap_or(rest);
        let (host, port) = match rest.rsplit_once(':') {
            // A colon within brackets belongs to an IPv6 address.
            Some((host, port)) if !port.ends_with(']') => {
                let digits = port.bytes().all(|byte| byte.is_ascii_digit());
                let port = port.parse().ok().filter(|port| digits && *port > 0);
                (host, port.ok_or_else(|| bad("needs a port from 1 to 65535 after its colon"))?)
            }
            _ => (rest, PORT),
        };
        if !is_host(host) {
            return Err(bad("needs a host name or address and no path, as in http://h1:2379; \
                 an IPv6 address stands in brackets"));
        }
        Ok(Endpoint { scheme, host: host.to_owned(), port })
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}:{}", self.scheme, self.host, self.port)
    }
}

fn is_host(text: &str) -> bool {
    match text.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
        Some(address) => address.parse::<std::net::Ipv6Addr>().is_ok(),
        None => {
            let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
            !text.is_empty() && text.bytes().all(allowed)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_out_is_added() {
        for (text, expected) in [
            ("h1", "http://h1:2379"),
            ("http://h1", "http://h1:2379"),
            ("HTTPS://h1:1/", "https://h1:1"),
            (
                "10.0.0.1:65535, h_2.example.org",
                "http://10.0.0.1:65535,http://h_2.example.org:2379",
            ),
            ("[::1]", "http://[::1]:2379"),
            ("https://[fd00::1]:4", "https://[fd00::1]:4"),
        ] {
            let endpoints = text.parse::<Endpoints>().unwrap();
            assert_eq!(endpoints.to_string(), expected, "{text}");
            assert_eq!(endpoints.to_string().parse(), Ok(endpoints), "{text}");
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (text, expected) in [
            ("", "is empty"),
            ("h1,", "is empty"),
            ("h1,,h2", "is empty"),
            ("ftp://h1", "http:// or https://"),
            ("h1:", "port"),
            ("h1:+1", "port"),
            ("h1:0", "port"),
            ("h1:65536", "port"),
            ("http://", "host name"),
            ("http://h1/v3", "no path"),
            ("h1:2379/v3", "port"),
            ("::1", "IPv6"),
            ("fd00::1:2379", "IPv6"),
            ("[h1]", "host name"),
            ("h 1", "host name"),
            ("h1,http://h1:2379", "given twice"),
        ] {
            let error = text.parse::<Endpoints>().unwrap_err().to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }

    #[test]
    fn a_password_in_a_url_is_not_repeated() {
        let error = "http://root:secret@h1:2379".parse::<Endpoints>().unwrap_err();
        assert!(!format!("{error} {error:?}").contains("secret"));
        assert!(error.to_string().contains("UNISONO_ETCD_PASSWORD"));
    }
}
