//! What an etcd cluster of the lab promises. Every wait ends by itself or by [`PATIENCE`].

use std::env;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use unisono_netlab::{
    EtcdCluster, EtcdOptions, Link, Rate, etcd_on_or_skip, etcd_or_skip, lab_or_skip,
};

/// How long anything may take before a test calls it hung.
const PATIENCE: Duration = Duration::from_secs(60);

/// Set for a process that starts a cluster and is killed.
const DOOMED: &str = "UNISONO_NETLAB_TEST_DOOMED_ETCD";

#[test]
fn the_others_elect_a_leader_when_theirs_is_killed_and_it_comes_back_with_its_data() {
    let Some(mut cluster) = etcd_or_skip(3, EtcdOptions::default()) else { return };
    assert_eq!(cluster.nodes(), 3);
    assert_eq!(cluster.endpoints().split(',').count(), 3);
    // "key" and "value" in base64.
    let put = r#"{"key":"a2V5","value":"dmFsdWU="}"#;
    cluster.post(0, "/v3/kv/put", put).unwrap();

    let first = cluster.leader().unwrap();
    cluster.kill(first);
    assert_ne!(cluster.leader().unwrap(), first);
    cluster.restart(first).unwrap();
    cluster.wait_until_healthy(first).unwrap();
    let found = cluster.post(first, "/v3/kv/range", r#"{"key":"a2V5"}"#).unwrap();
    assert!(found.contains("dmFsdWU="), "{found}");
}

#[test]
fn clusters_at_the_same_time_do_not_meet() {
    let Some(one) = etcd_or_skip(1, EtcdOptions::default()) else { return };
    let other = EtcdCluster::start(1, EtcdOptions::default()).unwrap();
    assert_ne!(one.endpoints(), other.endpoints());
    one.post(0, "/v3/kv/put", r#"{"key":"a2V5","value":"dmFsdWU="}"#).unwrap();
    let found = other.post(0, "/v3/kv/range", r#"{"key":"a2V5"}"#).unwrap();
    assert!(!found.contains("dmFsdWU="), "{found}");
}

#[test]
fn nodes_on_hosts_lose_touch_when_a_link_is_cut() {
    let Some(lab) = lab_or_skip(3, Link::new(Rate::gbit(1))) else { return };
    let hosts: Vec<_> = lab.hosts().iter().collect();
    let Some(cluster) = etcd_on_or_skip(&hosts, EtcdOptions::default()) else { return };
    assert!(cluster.endpoint(0).contains(&lab.host(0).address().to_string()));

    let first = cluster.leader().unwrap();
    lab.host(first).cut().unwrap();
    // The leader that was cut off notices at last that it leads nothing.
    wait_for("another leader", || cluster.leader().unwrap() != first);
    lab.host(first).heal().unwrap();
    cluster.wait_until_healthy(first).unwrap();
}

#[test]
fn a_stopped_node_stays_silent_until_it_goes_on() {
    let Some(cluster) = etcd_or_skip(1, EtcdOptions::default()) else { return };
    cluster.stop(0);
    assert!(cluster.post(0, "/v3/kv/range", r#"{"key":"a2V5"}"#).is_err());
    cluster.cont(0);
    cluster.post(0, "/v3/kv/range", r#"{"key":"a2V5"}"#).unwrap();
}

#[test]
fn the_nodes_of_a_process_that_is_killed_end_with_it() {
    if env::var_os(DOOMED).is_some() {
        let Some(cluster) = etcd_or_skip(2, EtcdOptions::default()) else { return };
        cluster.processes().for_each(|process| println!("\nnode {process}"));
        println!("ready");
        thread::sleep(PATIENCE * 10);
    }
    if etcd_or_skip(1, EtcdOptions::default()).is_none() {
        return;
    }
    // The process that is killed cannot remove its files.
    let folder = tempfile::tempdir().unwrap();
    let mut doomed = Command::new(env::current_exe().unwrap())
        .args(["--exact", "the_nodes_of_a_process_that_is_killed_end_with_it", "--nocapture"])
        .env(DOOMED, "1")
        .env("TMPDIR", folder.path())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(doomed.stdout.take().unwrap()).lines().map(Result::unwrap);
    let nodes: Vec<String> = lines
        .take_while(|line| line != "ready")
        .filter_map(|line| line.strip_prefix("node ").map(|pid| format!("/proc/{pid}/ns/net")))
        .collect();
    assert_eq!(nodes.len(), 2);
    assert!(nodes.iter().all(|node| Path::new(node).exists()));
    doomed.kill().unwrap();
    doomed.wait().unwrap();
    // Dead, though the process that adopts orphans may not have reaped them yet.
    wait_for("the nodes to end", || !nodes.iter().any(|node| Path::new(node).exists()));
}

fn wait_for(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < deadline, "waited too long for {what}");
        thread::sleep(Duration::from_millis(20));
    }
}
