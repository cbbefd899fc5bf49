//! Checkpoints on real file systems: what is kept, what is refused, and what is left after a
//! writer was killed or ran out of room.
//!
//! Where a writer is to be killed or to live on a file system of its own, this test binary starts
//! itself again: the "test" [`as_writer`] does nothing unless it is started that way.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::thread;
use std::time::Duration;

use unisono_cluster::checkpoint::{
    CheckpointError, Checkpoints, Dtype, Loaded, Snapshot, Tensor, load,
};

/// The elements of the tensor in a checkpoint that is large enough to be interrupted.
const LARGE: usize = 1 << 20;

/// The file in a folder that its writer has locked.
const LOCK: &str = ".unisono-lock";

/// The state of a run that can be told from that of any other step.
fn weights(step: u64, length: usize) -> Vec<f32> {
    (0..length).map(|index| (step * 1000 + index as u64 % 997) as f32).collect()
}

fn save(
    checkpoints: &mut Checkpoints,
    step: u64,
    length: usize,
) -> Result<PathBuf, CheckpointError> {
    let weights = weights(step, length);
    let mut snapshot = Snapshot::new();
    snapshot.set("seed", 42 + step);
    snapshot.tensors.push(Tensor::from_f32("weights", vec![length], &weights));
    checkpoints.save(step, &snapshot)
}

/// It is the whole checkpoint of that step.
fn check(loaded: &Loaded, step: u64, length: usize) {
    assert_eq!(loaded.step(), step);
    assert_eq!(loaded.value::<u64>("seed").unwrap(), 42 + step);
    let tensor = loaded.tensor("weights").unwrap();
    assert_eq!((tensor.dtype, &*tensor.shape), (Dtype::F32, &[length][..]));
    assert!(tensor.to_f32().unwrap() == weights(step, length), "the weights of another step");
}

/// All files in the folder but the one that says who has it.
fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name != LOCK)
        .collect();
    names.sort();
    names
}

fn one_line(error: &CheckpointError) -> String {
    let text = error.to_string();
    assert!(!text.contains('\n') && text.len() < 300, "{text}");
    text
}

#[test]
fn the_newest_is_found_and_the_oldest_are_removed() {
    let parent = tempfile::tempdir().unwrap();
    let folder = parent.path().join("a/b");
    let mut checkpoints = Checkpoints::open(&folder, 2).unwrap();
    assert!(checkpoints.latest().unwrap().is_none());
    for step in [100, 200, 300] {
        let path = save(&mut checkpoints, step, 10).unwrap();
        assert_eq!(path, checkpoints.path(step));
        check(&checkpoints.latest().unwrap().unwrap().checkpoint, step, 10);
    }
    assert_eq!(names(&folder), ["step-000000200.safetensors", "step-000000300.safetensors"]);
    check(&load(&checkpoints.path(200)).unwrap(), 200, 10);
}

#[test]
fn the_checkpoint_of_a_step_can_be_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let mut checkpoints = Checkpoints::open(folder.path(), 2).unwrap();
    save(&mut checkpoints, 5, 10).unwrap();
    save(&mut checkpoints, 5, 20).unwrap();
    check(&checkpoints.latest().unwrap().unwrap().checkpoint, 5, 20);
    assert_eq!(checkpoints.steps().unwrap(), [5]);
}

#[test]
fn a_run_that_went_back_keeps_its_own_checkpoints_and_the_later_ones() {
    let folder = tempfile::tempdir().unwrap();
    let mut checkpoints = Checkpoints::open(folder.path(), 2).unwrap();
    for step in [10, 20, 900, 1000, 30, 40] {
        save(&mut checkpoints, step, 10).unwrap();
    }
    assert_eq!(checkpoints.steps().unwrap(), [30, 40, 900, 1000]);
}

#[test]
fn files_of_others_in_the_folder_are_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let mine = [".hidden", "notes.txt", "step-1.safetensors", "weights.safetensors"];
    for name in mine {
        fs::write(folder.path().join(name), name).unwrap();
    }
    let mut checkpoints = Checkpoints::open(folder.path(), 2).unwrap();
    assert!(checkpoints.latest().unwrap().is_none());
    for step in 1..=4 {
        save(&mut checkpoints, step, 10).unwrap();
    }
    for name in mine {
        assert_eq!(fs::read(folder.path().join(name)).unwrap(), name.as_bytes());
    }
    assert_eq!(checkpoints.steps().unwrap(), [3, 4]);
}

/// Damages the newest of three checkpoints and requires the previous one.
fn damage(how: impl Fn(&Path)) -> CheckpointError {
    let folder = tempfile::tempdir().unwrap();
    let mut checkpoints = Checkpoints::open(folder.path(), 3).unwrap();
    for step in [1, 2, 3] {
        save(&mut checkpoints, step, 10).unwrap();
    }
    how(&checkpoints.path(3));
    let mut latest = checkpoints.latest().unwrap().unwrap();
    check(&latest.checkpoint, 2, 10);
    assert_eq!(latest.refused.len(), 1);
    let refusal = latest.refused.remove(0);
    assert_eq!(refusal.path, checkpoints.path(3));
    let reason = one_line(&refusal.reason);
    assert!(reason.contains("step-000000003.safetensors"), "{reason}");
    refusal.reason
}

#[test]
fn a_damaged_checkpoint_is_refused_and_the_previous_one_used() {
    let flipped = damage(|path| {
        let mut bytes = fs::read(path).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        fs::write(path, bytes).unwrap();
    });
    assert!(matches!(flipped, CheckpointError::Damaged { .. }), "{flipped}");
    let empty = damage(|path| fs::write(path, "").unwrap());
    assert!(matches!(empty, CheckpointError::Damaged { .. }), "{empty}");
    let folder = damage(|path| {
        fs::remove_file(path).unwrap();
        fs::create_dir(path).unwrap();
    });
    assert!(matches!(folder, CheckpointError::Damaged { .. }), "{folder}");
    let dangling = damage(|path| {
        fs::remove_file(path).unwrap();
        std::os::unix::fs::symlink("nowhere", path).unwrap();
    });
    assert!(matches!(dangling, CheckpointError::Unreadable { .. }), "{dangling}");
    let foreign = damage(|path| {
        let none: [(&str, safetensors::tensor::TensorView); 0] = [];
        fs::write(path, safetensors::serialize(none, None).unwrap()).unwrap();
    });
    assert!(matches!(foreign, CheckpointError::Foreign { .. }), "{foreign}");
}

#[test]
fn a_checkpoint_cut_at_any_length_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let mut checkpoints = Checkpoints::open(folder.path(), 2).unwrap();
    save(&mut checkpoints, 1, 3).unwrap();
    let path = save(&mut checkpoints, 2, 3).unwrap();
    let length = fs::metadata(&path).unwrap().len();
    for length in (0..length).rev() {
        fs::File::options().write(true).open(&path).unwrap().set_len(length).unwrap();
        let latest = checkpoints.latest().unwrap().unwrap();
        check(&latest.checkpoint, 1, 3);
        assert!(matches!(latest.refused[0].reason, CheckpointError::Damaged { .. }), "{length}");
    }
}

#[test]
fn damaged_checkpoints_do_not_count_as_kept() {
    let folder = tempfile::tempdir().unwrap();
    let mut checkpoints = Checkpoints::open(folder.path(), 2).unwrap();
    for step in [10, 20, 35] {
        save(&mut checkpoints, step, 10).unwrap();
    }
    fs::write(checkpoints.path(35), "garbage").unwrap();
    check(&checkpoints.latest().unwrap().unwrap().checkpoint, 20, 10);
    for step in [30, 40] {
        save(&mut checkpoints, step, 10).unwrap();
    }
    // The damaged one lies between the two that are good.
    assert_eq!(checkpoints.steps().unwrap(), [30, 35, 40]);
    save(&mut checkpoints, 50, 10).unwrap();
    assert_eq!(checkpoints.steps().unwrap(), [40, 50]);
}

#[test]
fn checkpoints_of_which_none_is_good_are_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let mut checkpoints = Checkpoints::open(folder.path(), 2).unwrap();
    for step in [1, 2] {
        save(&mut checkpoints, step, 10).unwrap();
        fs::write(checkpoints.path(step), "garbage").unwrap();
    }
    let error = checkpoints.latest().unwrap_err();
    let text = one_line(&error);
    assert!(text.contains("(2) can be used") && text.contains("step-000000002"), "{text}");
    let CheckpointError::NoneGood { refused, .. } = error else { panic!("{text}") };
    assert_eq!(refused.len(), 2);
    assert_eq!(names(folder.path()).len(), 2, "nothing is removed");
}

#[test]
fn a_folder_that_cannot_be_used_is_refused_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    fs::write(&file, "mine").unwrap();
    for path in [file.clone(), file.join("below")] {
        let error = Checkpoints::open(path, 2).unwrap_err();
        assert!(matches!(error, CheckpointError::NotAFolder { .. }), "{error}");
        assert!(one_line(&error).contains("name another"), "{error}");
    }
    assert_eq!(fs::read(&file).unwrap(), b"mine");
    for keep in [0, 1] {
        let error = Checkpoints::open(folder.path(), keep).unwrap_err();
        assert!(matches!(error, CheckpointError::KeepsTooFew { .. }), "{error}");
    }
    let error = load(&folder.path().join("missing")).unwrap_err();
    assert!(matches!(error, CheckpointError::Unreadable { .. }), "{error}");
}

#[test]
fn a_save_that_fails_at_the_last_moment_leaves_everything_as_it_was() {
    let folder = tempfile::tempdir().unwrap();
    let mut checkpoints = Checkpoints::open(folder.path(), 2).unwrap();
    save(&mut checkpoints, 1, 10).unwrap();
    // A folder that is not empty cannot be replaced by a file.
    fs::create_dir_all(checkpoints.path(2).join("something")).unwrap();
    let error = save(&mut checkpoints, 2, 10).unwrap_err();
    assert!(one_line(&error).contains("step-000000002"), "{error}");
    check(&checkpoints.latest().unwrap().unwrap().checkpoint, 1, 10);
    assert_eq!(names(folder.path()), ["step-000000001.safetensors", "step-000000002.safetensors"]);
}

#[test]
fn two_runs_in_one_folder_are_told_about_each_other() {
    let folder = tempfile::tempdir().unwrap();
    let mut ours = Checkpoints::open(folder.path(), 2).unwrap();
    save(&mut ours, 1, 10).unwrap();
    let (_, said) = Writer::start(&[], folder.path(), "5..9").finish();
    assert!(said.contains("refused: InUse") && !said.contains("saved"), "{said}");
    let us = format!("process {} on ", std::process::id());
    assert!(said.contains(&us) && said.contains("name another folder"), "{said}");
    assert_eq!(names(folder.path()), ["step-000000001.safetensors"]);

    drop(ours);
    assert!(!folder.path().join(LOCK).exists(), "left behind");
    let (_, said) = Writer::start(&[], folder.path(), "5..7").finish();
    assert!(said.contains("saved 6"), "{said}");
}

#[test]
fn a_lock_file_that_no_process_holds_locks_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let mut writer = Writer::start(&[], folder.path(), "1..1000000");
    let mut line = String::new();
    while saved(&line).is_none() {
        line.clear();
        assert_ne!(writer.output.read_line(&mut line).unwrap(), 0, "the writer ended");
    }
    let error = Checkpoints::open(folder.path(), 2).unwrap_err();
    let holder = format!("process {} on ", writer.child.id());
    assert!(one_line(&error).contains(&holder), "{error}");
    writer.child.kill().unwrap();
    writer.finish();
    assert!(folder.path().join(LOCK).exists(), "the killed process could not remove it");
    Checkpoints::open(folder.path(), 2).unwrap();
}

/// A process that runs [`as_writer`], and its standard output; killed when dropped.
struct Writer {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl Writer {
    /// Starts `wrapper` with the writer's command line behind its own.
    fn start(wrapper: &[&str], folder: &Path, steps: &str) -> Writer {
        let this = std::env::current_exe().expect("a test has a path");
        let mut command = match wrapper {
            [] => Command::new(this),
            [program, arguments @ ..] => {
                let mut command = Command::new(program);
                command.args(arguments).arg(this);
                command
            }
        };
        command.args(["--exact", "as_writer", "--nocapture", "-q"]);
        command.env("UNISONO_TEST_WRITER", steps).env("UNISONO_TEST_FOLDER", folder);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let output = BufReader::new(child.stdout.take().expect("it is piped"));
        Writer { child, output }
    }

    /// What it says until it ends, and whether it ended well.
    fn finish(mut self) -> (bool, String) {
        let mut said = String::new();
        self.output.read_to_string(&mut said).unwrap();
        self.child.stderr.take().expect("it is piped").read_to_string(&mut said).unwrap();
        (self.child.wait().unwrap().success(), said)
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Saves the steps of the range `UNISONO_TEST_WRITER`, and says how each went.
#[test]
fn as_writer() {
    let Ok(steps) = std::env::var("UNISONO_TEST_WRITER") else { return };
    let (first, last) = steps.split_once("..").unwrap();
    let folder = std::env::var_os("UNISONO_TEST_FOLDER").unwrap();
    let mut checkpoints = match Checkpoints::open(PathBuf::from(folder), 2) {
        Ok(checkpoints) => checkpoints,
        Err(error) => return println!("\nrefused: {error:?}: {error}"),
    };
    for step in first.parse().unwrap()..last.parse().unwrap() {
        match save(&mut checkpoints, step, LARGE) {
            Ok(_) => println!("\nsaved {step}"),
            Err(error) => {
                println!("\nfailed {step}: {error:?}: {error}");
                let latest = checkpoints.latest().unwrap().unwrap();
                check(&latest.checkpoint, step - 1, LARGE);
                assert!(latest.refused.is_empty());
                let names = names(checkpoints.folder());
                assert!(names.iter().all(|name| name.starts_with("step-")), "{names:?}");
                return println!("step {} is intact", step - 1);
            }
        }
    }
}

/// The step that a line of a writer's output says was saved.
fn saved(line: &str) -> Option<u64> {
    line.strip_prefix("saved ")?.trim().parse().ok()
}

#[test]
fn a_writer_that_is_killed_leaves_a_good_checkpoint() {
    const KILLS: u64 = 25;
    let folder = tempfile::tempdir().unwrap();
    let (mut step, mut interrupted) = (1, 0);
    for kill in 0..KILLS {
        let mut writer = Writer::start(&[], folder.path(), &format!("{step}..1000000"));
        let mut acknowledged = None;
        let mut line = String::new();
        while acknowledged.is_none() {
            line.clear();
            assert_ne!(writer.output.read_line(&mut line).unwrap(), 0, "the writer ended");
            acknowledged = saved(&line);
        }
        thread::sleep(Duration::from_micros(700 * kill));
        writer.child.kill().unwrap();
        let (_, said) = writer.finish();
        let acknowledged = said.lines().filter_map(saved).next_back().or(acknowledged).unwrap();
        interrupted += u64::from(names(folder.path()).iter().any(|name| name.starts_with('.')));

        let mut checkpoints = Checkpoints::open(folder.path(), 2).unwrap();
        let latest = checkpoints.latest().unwrap().unwrap();
        assert!(latest.refused.is_empty(), "{:?}", latest.refused);
        let found = latest.checkpoint.step();
        assert!(found == acknowledged || found == acknowledged + 1, "{found}, {acknowledged}");
        check(&latest.checkpoint, found, LARGE);
        let names = names(folder.path());
        assert!(names.iter().all(|name| name.starts_with("step-")), "{names:?}");
        step = found + 1;
    }
    assert!(interrupted > 0, "no kill hit a writer in the middle of a save");
}

#[test]
fn a_limit_on_the_size_of_files_fails_the_save_and_harms_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let mut checkpoints = Checkpoints::open(folder.path(), 2).unwrap();
    save(&mut checkpoints, 1, LARGE).unwrap();
    drop(checkpoints);
    // The signal is ignored, so that the write fails instead.
    let limited = ["sh", "-c", r#"trap "" XFSZ; ulimit -f 1000; exec "$@""#, "sh"];
    let (success, said) = Writer::start(&limited, folder.path(), "2..3").finish();
    assert!(success && said.contains("failed 2: Full"), "{said}");
    assert!(said.contains("free some space") && said.contains("step 1 is intact"), "{said}");
    let mut checkpoints = Checkpoints::open(folder.path(), 2).unwrap();
    check(&checkpoints.latest().unwrap().unwrap().checkpoint, 1, LARGE);
}

/// Runs a writer under a shell script that has a mount namespace to itself, where it has put a
/// file system at `$UNISONO_TEST_FOLDER`. `None` where this user may not.
fn with_own_mounts(script: &str, steps: &str) -> Option<(bool, String)> {
    for namespaces in ["-m", "-rm"] {
        let possible = Command::new("unshare")
            .args([namespaces, "mount", "-t", "tmpfs", "none", "/mnt"])
            .output()
            .is_ok_and(|output| output.status.success());
        if possible {
            let folder = tempfile::tempdir().unwrap();
            let wrapper = ["unshare", namespaces, "sh", "-ec", script, "sh"];
            return Some(Writer::start(&wrapper, folder.path(), steps).finish());
        }
    }
    println!("SKIPPED: no mount namespaces here");
    None
}

#[test]
fn a_full_disk_fails_the_save_and_harms_nothing() {
    // Room for one checkpoint and a half.
    let script = r#"mount -t tmpfs -o size=6m none "$UNISONO_TEST_FOLDER"; exec "$@""#;
    let Some((success, said)) = with_own_mounts(script, "1..3") else { return };
    assert!(success && said.contains("saved 1"), "{said}");
    assert!(said.contains("failed 2: Full") && said.contains("free some space"), "{said}");
    assert!(said.contains("step 1 is intact"), "{said}");
}

#[test]
fn a_folder_that_is_read_only_is_refused_at_once() {
    let script = r#"mount -t tmpfs -o ro none "$UNISONO_TEST_FOLDER"; exec "$@""#;
    let Some((success, said)) = with_own_mounts(script, "1..2") else { return };
    assert!(success && said.contains("refused: Unwritable"), "{said}");
    assert!(said.contains("make it writable or name another folder"), "{said}");
}

#[test]
fn a_folder_that_became_read_only_is_refused_and_not_harmed() {
    let script = r#"
        mount -t tmpfs none "$UNISONO_TEST_FOLDER"
        "$@"
        mount -o remount,ro "$UNISONO_TEST_FOLDER"
        UNISONO_TEST_WRITER=2..3 "$@"
        cp "$UNISONO_TEST_FOLDER/step-000000001.safetensors" /dev/null
        ls -A "$UNISONO_TEST_FOLDER""#;
    let Some((success, said)) = with_own_mounts(script, "1..2") else { return };
    assert!(success && said.contains("saved 1"), "{said}");
    assert!(said.contains("refused: Unwritable"), "{said}");
    assert!(said.trim_end().ends_with("\nstep-000000001.safetensors"), "{said}");
}
