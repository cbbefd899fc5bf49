use tempfile::TempDir;

use super::*;
use crate::advice::Prediction;
use crate::record::RankStep;

fn info() -> RunInfo {
    let mut info = RunInfo { name: "test".into(), workers: 2, ..RunInfo::default() };
    info.hosts = vec!["a".into(), "b".into()];
    info.settings.insert("seed".into(), 7.into());
    info.settings
        .insert("optimizer".into(), toml::Table::from_iter([("lr".into(), 0.1.into())]).into());
    info
}

fn step(step: u64) -> StepRecord {
    let begin = step as f64;
    let rank = RankStep {
        begin,
        computed: begin + 0.5,
        reduced: begin + 0.7,
        end: begin + 1.0,
        compute: 0.4,
        backward: 0.2,
        device: None,
        buckets: vec![],
    };
    let ranks = vec![rank.clone(), rank];
    StepRecord { step, loss: 1.0, samples: 8, wire_bytes: 16, ranks, agreed: true, encoded: None }
}

fn run_of(steps: u64) -> (TempDir, RunFolder) {
    let dir = TempDir::new().unwrap();
    let mut folder = RunFolder::create(dir.path().join("run"), &info()).unwrap();
    for number in 0..steps {
        folder.append(&step(number)).unwrap();
    }
    (dir, folder)
}

fn add_to_steps(folder: &RunFolder, text: &str) {
    let mut file = File::options().append(true).open(folder.path().join(STEPS)).unwrap();
    file.write_all(text.as_bytes()).unwrap();
}

/// The text of the error, which must be one line.
fn refusal(result: Result<Run, FolderError>) -> String {
    let text = result.unwrap_err().to_string();
    assert!(!text.contains('\n'), "{text}");
    text
}

#[test]
fn what_was_written_is_read_back() {
    let (_dir, folder) = run_of(10);
    let path = folder.path().to_path_buf();
    let outcome =
        Outcome { accuracy: Some(0.975), held_out_loss: Some(0.08), weights_hash: "abc".into() };
    let scaling = Scaling { one_worker_samples_per_s: 5.0 };
    let finished = folder.finish(outcome, Some(scaling)).unwrap();

    let run = RunFolder::open(&path).unwrap();
    assert_eq!(run.info, info());
    assert_eq!(run.steps, (0..10).map(step).collect::<Vec<_>>());
    assert_eq!(run.summary, finished.summary);
    let summary = run.summary.unwrap();
    assert_eq!((summary.steps, summary.accuracy), (10, Some(0.975)));
    assert!((summary.step_ms - 1000.0).abs() < 1e-6, "{}", summary.step_ms);
    assert!((summary.scaling_efficiency.unwrap() - 0.8).abs() < 1e-9);
    let mut files: Vec<_> =
        fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    files.sort();
    assert_eq!(files, [REPORT, INFO, STEPS, SUMMARY, TRACE]);
}

#[test]
fn advice_is_read_back_and_may_change() {
    let (_dir, mut folder) = run_of(10);
    let row =
        Prediction { codec: "int8".into(), seconds: 0.5, coding_seconds: 0.1, wire_bytes: 400 };
    let mut advice = Advice {
        step: 3,
        rows: vec![row],
        chosen: "none".into(),
        measured_dense_seconds: 1.0,
        reason: "too little to gain".into(),
        observed_steps: 8,
        deciding_bytes: 16,
        deciding_seconds: 0.5,
    };
    assert_eq!(RunFolder::open(folder.path()).unwrap().advice, None);
    folder.advise(&advice).unwrap();
    advice.chosen = "int8".into();
    folder.advise(&advice).unwrap();
    let run = RunFolder::open(folder.path()).unwrap();
    assert_eq!(run.advice.as_ref(), Some(&advice));
    let report = run.report().terminal(100);
    assert!(report.contains("int8") && report.contains("too little to gain"), "{report}");

    fs::write(folder.path().join(ADVICE), "[]").unwrap();
    let text = refusal(RunFolder::open(folder.path()));
    assert!(text.contains("advice.json:1: not the advice for a codec"), "{text}");
}

#[test]
fn a_killed_run_is_read_up_to_its_last_complete_step() {
    let (_dir, folder) = run_of(3);
    add_to_steps(&folder, r#"{"step":3,"loss":0."#);
    let run = RunFolder::open(folder.path()).unwrap();
    assert_eq!(run.steps.len(), 3);
    assert_eq!(run.summary, None);
    run.write().unwrap();
    assert!(run.report_path().exists());
}

#[test]
fn a_broken_line_is_named() {
    let (_dir, folder) = run_of(3);
    add_to_steps(&folder, "{\"step\":3,\"loss\":0.\n");
    let text = refusal(RunFolder::open(folder.path()));
    assert!(text.contains("steps.jsonl:4: not the record of a step"), "{text}");
}

#[test]
fn records_of_another_run_are_refused() {
    let (_dir, folder) = run_of(3);
    add_to_steps(&folder, &(serde_json::to_string(&step(1)).unwrap() + "\n"));
    let text = refusal(RunFolder::open(folder.path()));
    assert!(text.contains("steps.jsonl:4: step 1 after step 2"), "{text}");

    let (_dir, folder) = run_of(1);
    let mut alone = step(1);
    alone.ranks.pop();
    add_to_steps(&folder, &(serde_json::to_string(&alone).unwrap() + "\n"));
    let text = refusal(RunFolder::open(folder.path()));
    assert!(text.contains("steps.jsonl:2: a step of 1 rank in a run of 2"), "{text}");
}

#[test]
fn other_folders_and_broken_files_are_refused() {
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, "").unwrap();
    for (path, reason) in [
        (dir.path().to_path_buf(), "it has no run.toml"),
        (dir.path().join("nowhere"), "it does not exist"),
        (file, "it is a file"),
    ] {
        let text = refusal(RunFolder::open(path));
        assert!(text.contains("is not the folder of a run") && text.contains(reason), "{text}");
    }
    fs::write(dir.path().join(INFO), "name = \"x\"\nworkers = \"two\"\n").unwrap();
    let text = refusal(RunFolder::open(dir.path()));
    assert!(text.contains("run.toml:2: "), "{text}");

    let (_dir, folder) = run_of(1);
    fs::write(folder.path().join(SUMMARY), "{\n}").unwrap();
    let text = refusal(RunFolder::open(folder.path()));
    assert!(text.contains("summary.json:2: not the summary of a run"), "{text}");
}

#[test]
fn what_is_in_place_of_a_file_or_missing_is_said() {
    const BYTES: [u8; 6] = [0x80, 0, 0xff, 0xfe, 0x89, b'P'];
    for (file, line) in [(INFO, 1), (STEPS, 1), (SUMMARY, 1)] {
        let (_dir, folder) = run_of(2);
        fs::write(folder.path().join(file), BYTES).unwrap();
        let text = refusal(RunFolder::open(folder.path()));
        assert!(text.contains(&format!("{file}:{line}: it is not text")), "{text}");
    }
    let (_dir, folder) = run_of(2);
    fs::write(folder.path().join(STEPS), "something else").unwrap();
    let text = refusal(RunFolder::open(folder.path()));
    assert!(text.contains("steps.jsonl:1: not the record of a step"), "{text}");

    fs::remove_file(folder.path().join(STEPS)).unwrap();
    assert!(!crate::relaxed::RelaxedFolder::is_relaxed(folder.path()), "taken for another kind");
    let text = refusal(RunFolder::open(folder.path()));
    assert!(text.contains("steps.jsonl is missing: it held the records of its steps"), "{text}");
}

/// The report is not worth the run.
#[test]
fn a_run_is_summed_up_though_its_disk_is_full() {
    let (_dir, folder) = run_of(4);
    let path = folder.path().to_path_buf();
    // Nothing can be created any more, not even by root.
    let temporary = format!("summary.json.{}.partial", std::process::id());
    fs::create_dir(path.join(temporary)).unwrap();
    let unwritten = (4..9).map(step).collect();
    let (run, written) = folder.finish_with(unwritten, Outcome::default(), None);
    assert!(matches!(written, Err(FolderError::Write { .. })), "{written:?}");
    assert_eq!(run.summary.unwrap().steps, 9);
    assert_eq!(RunFolder::open(&path).unwrap().steps.len(), 4);
}

#[test]
fn an_earlier_run_is_never_overwritten() {
    let (_dir, folder) = run_of(2);
    let error = RunFolder::create(folder.path(), &info()).unwrap_err();
    assert!(matches!(error, FolderError::Occupied { .. }), "{error}");
    assert_eq!(RunFolder::open(folder.path()).unwrap().steps.len(), 2);
}

#[test]
fn a_file_in_the_way_is_named_with_what_to_do() {
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, "").unwrap();
    for path in [file.clone(), file.join("run")] {
        let error = RunFolder::create(&path, &info()).unwrap_err();
        let text = error.to_string();
        assert!(text.contains(&path.display().to_string()), "{text}");
        assert!(text.ends_with("choose another folder"), "{text}");
    }
}

/// `/dev/full` refuses every write as a full disk does.
#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_says_so() {
    let (_dir, mut folder) = run_of(1);
    folder.steps.file = File::options().append(true).open("/dev/full").unwrap();
    let text = folder.append(&step(1)).unwrap_err().to_string();
    assert!(text.contains("steps.jsonl") && text.contains("free some space"), "{text}");
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_costs_no_earlier_file() {
    let (_dir, folder) = run_of(1);
    let path = folder.path().join(SUMMARY);
    fs::write(&path, "earlier").unwrap();
    let full = |_: &mut BufWriter<File>| Err(io::Error::from(io::ErrorKind::StorageFull));
    let text = replace(&path, full).unwrap_err().to_string();
    assert!(text.contains("summary.json") && text.contains("free some space"), "{text}");
    assert_eq!(fs::read_to_string(&path).unwrap(), "earlier");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 3);
}

#[test]
fn a_glance_finds_the_last_step_without_reading_the_others() {
    let (_dir, folder) = run_of(400);
    add_to_steps(&folder, "{\"step\":400,\"lo");
    let (read, last) = glance(folder.path()).unwrap();
    assert_eq!((read, last), (info(), Some(step(399))));
    let (_dir, folder) = run_of(0);
    assert_eq!(glance(folder.path()).unwrap().1, None);
    let (_dir, folder) = run_of(1);
    assert_eq!(glance(folder.path()).unwrap().1, Some(step(0)));
    // A line that is longer than what is read at first.
    let mut long = step(1);
    long.ranks = vec![long.ranks[0].clone(); 5000];
    add_to_steps(&folder, &format!("{}\n", serde_json::to_string(&long).unwrap()));
    assert_eq!(glance(folder.path()).unwrap().1, Some(long));
}
