//! What a world of many ranks costs on this machine: how long it takes to form, what each rank
//! holds, how long an all-reduce takes, and how soon all know of a rank that is killed.
//!
//! ```text
//! cargo build --release --workspace --bins --examples
//! target/release/examples/ranks 256 shm
//! target/release/examples/ranks 256 tcp
//! ```
//!
//! It starts the ranks itself, as processes, since a launcher would end the others after the kill.

use std::io::{BufRead, BufReader, PipeWriter, Write};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant, SystemTime};

use unisono::net::Token;
use unisono::prelude::*;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// Elements of a small and of a large all-reduce: 1 KiB and 1 MiB.
const SIZES: [usize; 2] = [256, 1 << 18];
/// Of each size; their median counts, since the first opens the connections it needs.
const REPETITIONS: usize = 7;

fn main() -> Outcome<()> {
    let mut arguments = std::env::args().skip(1);
    let ranks = arguments.next().ok_or("ranks NUMBER shm|tcp")?;
    if ranks == "as-rank" {
        return as_rank();
    }
    let transport = arguments.next().unwrap_or_else(|| "auto".to_owned());
    measure(ranks.parse()?, &transport)
}

/// Starts the ranks, collects what they say and prints one line.
fn measure(ranks: usize, transport: &str) -> Outcome<()> {
    let port = std::net::TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port();
    let token = Token::random()?.to_hex();
    let (lines, writer) = std::io::pipe()?;
    let started = now();
    let mut processes = (0..ranks)
        .map(|rank| {
            Command::new(std::env::current_exe()?)
                .arg("as-rank")
                .envs([("MASTER_ADDR", "127.0.0.1"), ("UNISONO_TRANSPORT", transport)])
                .envs(
                    [("RANK", rank), ("WORLD_SIZE", ranks), ("MASTER_PORT", port.into())]
                        .map(|(name, number): (_, usize)| (name, number.to_string())),
                )
                .envs([("UNISONO_TOKEN", token.as_str()), ("UNISONO_TIMEOUT", "120")])
                .stdin(Stdio::null())
                .stdout(PipeWriter::try_clone(&writer)?)
                .spawn()
        })
        .collect::<Result<Vec<_>, _>>()?;
    drop(writer);

    let mut said: Vec<Vec<f64>> = Vec::new();
    let mut heard: Vec<f64> = Vec::new();
    let mut killed = None;
    for line in BufReader::new(lines).lines() {
        let line = line?;
        let (kind, figures) = line.split_once(' ').ok_or("a rank said nothing")?;
        let figures: Vec<f64> = figures.split(' ').map(str::parse).collect::<Result<_, _>>()?;
        match kind {
            "formed" => said.push(figures),
            "killed" => killed = Some(figures[0]),
            "heard" => heard.push(figures[0]),
            _ => return Err(format!("a rank said: {line}").into()),
        }
    }
    for process in &mut processes {
        process.wait()?;
    }
    let killed = killed.ok_or("no rank came as far as being killed")?;
    if said.len() != ranks || heard.len() != ranks - 1 {
        return Err(
            format!("{} ranks formed, {} heard of the kill", said.len(), heard.len()).into()
        );
    }
    let column = |at: usize| {
        let mut column: Vec<f64> = said.iter().map(|figures| figures[at]).collect();
        column.sort_by(f64::total_cmp);
        (column[column.len() / 2], column[column.len() - 1])
    };
    heard.sort_by(f64::total_cmp);
    let after = |at: f64| (at - killed) * 1e3;
    println!(
        "{ranks} ranks over {transport}: all formed {:.2} s after the first was started; \
         joining took {:.2} s (median) to {:.2} s; a rank has {:.0} descriptors (at most {:.0}), \
         {:.1} MB (at most {:.1}) and {:.0} threads; all-reduce of 1 KiB {:.2} ms, of 1 MiB \
         {:.2} ms, verified; after a kill half of the others knew in {:.0} ms, all in {:.0} ms",
        column(0).1 - started,
        column(1).0,
        column(1).1,
        column(4).0,
        column(4).1,
        column(5).0,
        column(5).1,
        column(6).0,
        column(2).0 * 1e3,
        column(3).0 * 1e3,
        after(heard[heard.len() / 2]),
        after(heard[heard.len() - 1]),
    );
    Ok(())
}

/// One rank: joins, reduces, says what it measured; then one is killed and the others hear of it.
fn as_rank() -> Outcome<()> {
    let start = Instant::now();
    let job = Job::join()?;
    let joining = start.elapsed();
    let formed = now();
    let world = job.world();
    let mut times = Vec::new();
    for elements in SIZES {
        let mut durations: Vec<Duration> = Vec::new();
        for _ in 0..REPETITIONS {
            world.barrier()?;
            let mut buffer = vec![world.rank() as f32; elements];
            let start = Instant::now();
            world.all_reduce(&mut buffer, Reduction::Sum)?;
            durations.push(start.elapsed());
            let sum = (world.size() * (world.size() - 1) / 2) as f32;
            assert!(buffer.iter().all(|element| *element == sum), "{elements} elements");
        }
        durations.sort();
        times.push(durations[REPETITIONS / 2].as_secs_f64());
    }
    let descriptors = std::fs::read_dir("/proc/self/fd")?.count() - 1;
    let megabytes = proportional_memory()? as f64 / 1e6;
    let threads = std::fs::read_dir("/proc/self/task")?.count();
    say(&format!(
        "formed {formed} {} {} {} {descriptors} {megabytes} {threads}\n",
        joining.as_secs_f64(),
        times[0],
        times[1],
    ))?;
    world.barrier()?;
    if world.rank() == world.size() / 2 {
        // The others are in the barrier that this rank does not enter.
        std::thread::sleep(Duration::from_secs(1));
        say(&format!("killed {}\n", now()))?;
        let _ = Command::new("kill").args(["-9", &std::process::id().to_string()]).status();
    }
    let lost = world.barrier().expect_err("a rank was killed");
    say(&format!("heard {}\n", now()))?;
    assert!(lost.to_string().contains(&format!("rank {}", world.size() / 2)), "{lost}");
    Ok(())
}

/// In one write, so that lines of several ranks do not mix.
fn say(line: &str) -> std::io::Result<()> {
    std::io::stdout().lock().write_all(line.as_bytes())
}

/// Seconds on a clock that all processes of the machine share.
fn now() -> f64 {
    SystemTime::UNIX_EPOCH.elapsed().expect("it is after 1970").as_secs_f64()
}

/// Bytes of memory, with this process's part of what it shares with others.
fn proportional_memory() -> Outcome<usize> {
    let rollup = std::fs::read_to_string("/proc/self/smaps_rollup")?;
    let line = rollup.lines().find_map(|line| line.strip_prefix("Pss:")).ok_or("no Pss")?;
    Ok(line.trim().trim_end_matches(" kB").parse::<usize>()? * 1024)
}
