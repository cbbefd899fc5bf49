//! What the report advises.

use crate::common::Desk;

#[test]
fn equal_workers_are_advised_to_stay_in_step() {
    for level in ["bsp", "async"] {
        let desk = Desk::new();
        let summary =
            desk.train(&format!("--strategy {level} --workers 2 --steps 300 --run-dir run"));
        assert_eq!(summary.object["advised"], "bsp", "{level}: {}", summary.object["advice"]);
        assert!(desk.read("run/report.html").contains("bsp suits"), "{level}");
    }
}

#[test]
fn workers_behind_a_slow_one_are_advised_not_to_wait() {
    for level in ["bsp", "ssp:3", "async"] {
        let desk = Desk::new();
        // Slow enough to stand out from what a busy machine adds to every exchange.
        let settings = "--workers 4 --slow 1:10 --steps 200 --run-dir run";
        let summary = desk.train(&format!("--strategy {level} {settings}"));
        let advice = summary.object["advice"].as_str().unwrap_or_default();
        assert_eq!(summary.object["advised"], "async", "{level}: {advice}");
        assert!(advice.contains("worker 1 takes"), "{level}: {advice}");
        assert!(desk.read("run/report.html").contains("async suits"), "{level}");
    }
}
