//! The JSON of etcd's gateway: keys and values in base64, 64-bit numbers as text, and fields that are
//! zero left out.

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde::de::Error;
use serde::{Deserialize, Deserializer};
use serde_json::json;

use super::Versioned;

pub(super) fn range(key: &str) -> Vec<u8> {
    json!({ "key": encode(key) }).to_string().into_bytes()
}

/// A key that does not exist has modification revision 0 in a comparison.
pub(super) fn write_if(key: &str, expected: u64, value: &[u8]) -> Vec<u8> {
    let key = encode(key);
    json!({
        "compare": [{
            "key": key,
            "target": "MOD",
            "result": "EQUAL",
            "mod_revision": expected.to_string(),
        }],
        "success": [{ "request_put": { "key": key, "value": encode(value) } }],
        "failure": [{ "request_range": { "key": key } }],
    })
    .to_string()
    .into_bytes()
}

pub(super) fn watch(key: &str, from: u64) -> Vec<u8> {
    let request = json!({ "key": encode(key), "start_revision": from.to_string() });
    json!({ "create_request": request }).to_string().into_bytes()
}

pub(super) fn authenticate(user: &str, password: &str) -> Vec<u8> {
    json!({ "name": user, "password": password }).to_string().into_bytes()
}

#[derive(Deserialize)]
pub(super) struct Version {
    pub etcdserver: String,
}

#[derive(Deserialize)]
pub(super) struct Token {
    pub token: String,
}

#[derive(Deserialize)]
pub(super) struct Failed {
    #[serde(default)]
    pub error: String,
    #[serde(default)]
    pub message: String,
    pub code: u32,
}

#[derive(Deserialize)]
pub(super) struct Range {
    header: Header,
    #[serde(default)]
    kvs: Vec<KeyValue>,
}

impl Range {
    /// The revision of the store, and what the key holds.
    pub fn of(self, key: &str) -> Result<(u64, Option<Versioned>), String> {
        Ok((self.header.revision, the_one(self.kvs, key)?))
    }
}

#[derive(Deserialize)]
pub(super) struct Txn {
    header: Header,
    #[serde(default)]
    succeeded: bool,
    #[serde(default)]
    responses: Vec<TxnResponse>,
}

/// What became of a comparison and the write that depends on it.
pub(super) enum Compared {
    /// Equal, and written at this revision.
    Equal(u64),
    /// The key holds this instead.
    Different(Option<Versioned>),
}

impl Txn {
    pub fn of(self, key: &str) -> Result<Compared, String> {
        if self.succeeded {
            return Ok(Compared::Equal(self.header.revision));
        }
        let response = self.responses.into_iter().next().and_then(|it| it.response_range);
        let kvs = response.ok_or("the transaction failed without saying what the key holds")?.kvs;
        the_one(kvs, key).map(Compared::Different)
    }
}

#[derive(Deserialize)]
struct TxnResponse {
    response_range: Option<RangeInTxn>,
}

#[derive(Deserialize)]
struct RangeInTxn {
    #[serde(default)]
    kvs: Vec<KeyValue>,
}

/// One line of a watch.
#[derive(Deserialize)]
pub(super) struct Watched {
    result: WatchResult,
}

impl Watched {
    /// The last value that the line brings, if it brings one.
    pub fn of(self, key: &str) -> Result<Option<Versioned>, String> {
        // A deletion is the only event with a type, and is no value.
        let put = self.result.events.into_iter().rev().find(|event| event.kind.is_none());
        put.map_or(Ok(None), |event| the_one(vec![event.kv], key))
    }
}

#[derive(Deserialize)]
struct WatchResult {
    #[serde(default)]
    events: Vec<Event>,
}

#[derive(Deserialize)]
struct Event {
    #[serde(rename = "type")]
    kind: Option<serde_json::Value>,
    kv: KeyValue,
}

#[derive(Deserialize)]
struct Header {
    #[serde(deserialize_with = "number")]
    revision: u64,
}

#[derive(Deserialize)]
struct KeyValue {
    #[serde(deserialize_with = "bytes")]
    key: Vec<u8>,
    #[serde(deserialize_with = "number")]
    mod_revision: u64,
    #[serde(default, deserialize_with = "bytes")]
    value: Vec<u8>,
}

fn the_one(kvs: Vec<KeyValue>, key: &str) -> Result<Option<Versioned>, String> {
    let mut kvs = kvs.into_iter();
    match (kvs.next(), kvs.next()) {
        (None, _) => Ok(None),
        (Some(kv), None) if kv.key == key.as_bytes() && kv.mod_revision > 0 => {
            Ok(Some(Versioned { value: kv.value, revision: kv.mod_revision }))
        }
        (Some(_), None) => Err("the answer is about another key".to_owned()),
        (Some(_), Some(_)) => Err("the answer is about several keys".to_owned()),
    }
}

fn encode(bytes: impl AsRef<[u8]>) -> String {
    BASE64_STANDARD.encode(bytes)
}

fn bytes<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u8>, D::Error> {
    let text = String::deserialize(deserializer)?;
    BASE64_STANDARD.decode(text).map_err(D::Error::custom)
}

fn number<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Either {
        Text(String),
        Number(u64),
    }
    match Either::deserialize(deserializer)? {
        Either::Number(number) => Ok(number),
        Either::Text(text) => text.parse().map_err(D::Error::custom),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read<'a, T: Deserialize<'a>>(text: &'a str) -> Result<T, String> {
        serde_json::from_str(text).map_err(|error| error.to_string())
    }

    #[test]
    fn answers_of_etcd_are_understood() {
        let absent = r#"{"header":{"cluster_id":"1","revision":"7","raft_term":"2"}}"#;
        let (revision, value) = read::<Range>(absent).unwrap().of("k").unwrap();
        assert_eq!((revision, value), (7, None));

        let present = r#"{"header":{"revision":"7"},"kvs":[{"key":"aw==","create_revision":"2",
            "mod_revision":"5","version":"1","value":"dg=="}],"count":"1"}"#;
        let value = Versioned { value: b"v".to_vec(), revision: 5 };
        let (_, found) = read::<Range>(present).unwrap().of("k").unwrap();
        assert_eq!(found.as_ref(), Some(&value));
        assert!(read::<Range>(present).unwrap().of("other").is_err());

        let written =
            r#"{"header":{"revision":"8"},"succeeded":true,"responses":[{"response_put":{}}]}"#;
        assert!(matches!(read::<Txn>(written).unwrap().of("k"), Ok(Compared::Equal(8))));
        let refused = r#"{"header":{"revision":"8"},"responses":[{"response_range":{"kvs":[
            {"key":"aw==","mod_revision":"5","value":"dg=="}]}}]}"#;
        let Ok(Compared::Different(found)) = read::<Txn>(refused).unwrap().of("k") else {
            panic!()
        };
        assert_eq!(found.as_ref(), Some(&value));

        let watched = r#"{"result":{"header":{},"events":[{"kv":{"key":"aw==","mod_revision":"4"}},
            {"kv":{"key":"aw==","mod_revision":"5","value":"dg=="}},
            {"type":"DELETE","kv":{"key":"aw==","mod_revision":"6"}}]}}"#;
        assert_eq!(read::<Watched>(watched).unwrap().of("k"), Ok(Some(value)));
        let created = r#"{"result":{"header":{"revision":"2"},"created":true}}"#;
        assert_eq!(read::<Watched>(created).unwrap().of("k"), Ok(None));
    }

    #[test]
    fn answers_that_are_not_etcds_are_refused() {
        for text in [
            "",
            "null",
            "{}",
            r#"{"header":{"revision":"-1"}}"#,
            r#"{"header":{"revision":"18446744073709551616"}}"#,
            r#"{"header":{"revision":1.5}}"#,
            r#"{"header":{"revision":"7"},"kvs":[{"key":"aw==","mod_revision":"5","value":"v"}]}"#,
            r#"{"header":{"revision":"7"},"kvs":[{"key":"aw==","mod_revision":"0","value":"dg=="}]}"#,
            r#"{"header":{"revision":"7"},"kvs":[{"key":"aw==","mod_revision":"5"},{"key":"aw==","mod_revision":"5"}]}"#,
        ] {
            let result = read::<Range>(text).and_then(|range| range.of("k"));
            assert!(result.is_err(), "{text}: {result:?}");
        }
        let silent = r#"{"header":{"revision":"8"},"responses":[]}"#;
        assert!(read::<Txn>(silent).unwrap().of("k").is_err());
    }
}
