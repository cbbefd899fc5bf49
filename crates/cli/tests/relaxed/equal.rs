//! `--strategy bsp` gives the weights of the all-reduce strategy, bit for bit.

use crate::common::{Desk, Summary};

/// Trains in both ways, with the same settings otherwise.
struct Pair {
    desk: Desk,
    settings: String,
    reference: Summary,
}

impl Pair {
    fn new(settings: &str) -> Pair {
        Pair::on(Desk::new(), settings)
    }

    fn on(desk: Desk, settings: &str) -> Pair {
        let reference = desk.train(&format!("--workers 2 {settings}"));
        Pair { desk, settings: settings.to_owned(), reference }
    }

    fn assert_equal_over(&self, servers: &str) {
        let settings = &self.settings;
        let summary = self.desk.train(&format!("--strategy bsp {servers} {settings}"));
        summary.assert_same_weights(&self.reference);
        assert_eq!(summary.object["ledger"], "balanced");
        assert_eq!(summary.count("max_lead"), 0);
        assert_eq!(summary.count("updates") * summary.count("workers"), summary.count("pushes"));
    }
}

#[test]
fn over_any_number_of_servers_and_workers() {
    let pair = Pair::new("--steps 30");
    for workers in 1..=4 {
        for servers in ["1", "2", "3", "inside"] {
            pair.assert_equal_over(&format!("--workers {workers} --servers {servers}"));
        }
    }
}

#[test]
fn over_tcp() {
    let pair = Pair::new("--steps 30 --transport tcp");
    for servers in
        ["--workers 3 --servers 1", "--workers 2 --servers 3", "--workers 3 --servers inside"]
    {
        pair.assert_equal_over(servers);
    }
}

#[test]
fn with_every_optimizer() {
    for optimizer in ["sgd", "momentum", "adagrad", "adamw"] {
        let schedule = "--schedule cosine --weight-decay 0.01";
        let pair = Pair::new(&format!("--steps 40 --optimizer {optimizer} {schedule}"));
        pair.assert_equal_over("--workers 3 --servers 2");
    }
}

#[test]
fn with_shards_that_workers_cannot_share_evenly() {
    for shards in
        ["--shards 7 --batch 35", "--shards 12 --batch 48", "--shards 24 --batch 48 --accumulate 3"]
    {
        let pair = Pair::new(&format!("--steps 20 {shards}"));
        pair.assert_equal_over("--workers 3 --servers 2");
        pair.assert_equal_over("--workers 4 --servers inside");
    }
}

#[test]
fn with_other_models() {
    Pair::new("--steps 10 --model conv").assert_equal_over("--workers 3 --servers 2");
    let desk = Desk::new();
    desk.write_text("words", 3000);
    let sizes = "--layers 1 --width 16 --heads 2 --context 16";
    let settings = format!("--steps 10 --model transformer --data text:words {sizes}");
    Pair::on(desk, &settings).assert_equal_over("--workers 3 --servers 2");
}
