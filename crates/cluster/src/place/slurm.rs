//! Slurm's `srun`.

use super::{LOOPBACK, Launcher, Place, PlaceError, Reader, Rendezvous, Vars, token};

pub(super) fn place(vars: &Vars) -> Result<Option<Place>, PlaceError> {
    let launcher = Launcher::Slurm;
    let reader = Reader { vars, launcher };
    // A batch script has a SLURM_PROCID too, but only `srun` starts steps of many tasks.
    let step = reader.text("SLURM_STEP_ID").or_else(|| reader.text("SLURM_STEPID"));
    let (Some(step), Some(_)) = (step, reader.text("SLURM_PROCID")) else { return Ok(None) };
    let job = reader.text("SLURM_JOB_ID").or_else(|| reader.text("SLURM_JOBID")).ok_or(
        PlaceError::Missing { launcher, variable: "SLURM_JOB_ID", meaning: "the job's id" },
    )?;
    let job_name = format!("slurm:{job}.{step}");
    let world = match reader.number("SLURM_STEP_NUM_TASKS", "the number of tasks")? {
        Some(world) => world,
        None => reader.count("SLURM_NTASKS", "the number of tasks")?,
    };
    let node: u32 = reader.count("SLURM_NODEID", "the number of this node")?;
    let rendezvous = match world {
        1 => Rendezvous::Alone,
        _ => reader.named_master(&job_name, || first_node(&reader))?,
    };
    Ok(Some(Place {
        rank: reader.count("SLURM_PROCID", "the rank of this process")?,
        world,
        local_rank: reader.count("SLURM_LOCALID", "the rank of this process on its node")?,
        local_world: tasks_here(&reader, world, node)?,
        node: Some(node),
        rendezvous,
        token: token(vars, launcher)?,
        job_name,
        launcher,
    }))
}

/// The machine of rank 0: the first of the step's nodes.
fn first_node(reader: &Reader<'_>) -> Result<String, PlaceError> {
    for variable in ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"] {
        let Some(list) = reader.text(variable) else { continue };
        let nodes = expand_nodes(list)
            .ok_or_else(|| reader.invalid(variable, list.into(), "a list of nodes"))?;
        return Ok(match nodes.as_slice() {
            [first, _, ..] => first.clone(),
            _ => LOOPBACK.into(),
        });
    }
    reader.required(None, "MASTER_ADDR", "the name or address of rank 0's machine")
}

/// How many tasks run on this node.
fn tasks_here(reader: &Reader<'_>, world: u32, node: u32) -> Result<u32, PlaceError> {
    const MEANING: &str = "a list of task counts";
    for variable in ["SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"] {
        let Some(list) = reader.text(variable) else { continue };
        let counts = expand_counts(list).filter(|counts| counts.len() > node as usize);
        return match counts {
            Some(counts) => Ok(counts[node as usize]),
            None => Err(reader.invalid(variable, list.into(), MEANING)),
        };
    }
    if reader.text("SLURM_STEP_NUM_NODES").or_else(|| reader.text("SLURM_NNODES")) == Some("1") {
        return Ok(world);
    }
    reader.required(None, "SLURM_STEP_TASKS_PER_NODE", MEANING)
}

/// Longest list of nodes that is expanded: lists come from the environment, which a mistake can
/// fill with `n[0-999999999999]`.
const MAX_NODES: usize = 100_000;

/// Expands `n[001-003,7],m1` to `n001 n002 n003 n7 m1`.
pub(super) fn expand_nodes(list: &str) -> Option<Vec<String>> {
    let mut nodes = Vec::new();
    for item in split_outside_brackets(list)? {
        expand_item("", item, &mut nodes)?;
    }
    (!nodes.is_empty()).then_some(nodes)
}

/// Splits at the commas that are not inside brackets.
fn split_outside_brackets(list: &str) -> Option<Vec<&str>> {
    let mut items = Vec::new();
    let (mut start, mut inside) = (0, false);
    for (position, character) in list.char_indices() {
        match character {
            '[' if inside => return None,
            '[' => inside = true,
            ']' if !inside => return None,
            ']' => inside = false,
            ',' if !inside => {
                items.push(&list[start..position]);
                start = position + 1;
            }
            _ => {}
        }
    }
    items.push(&list[start..]);
    (!inside).then_some(items)
}

/// Appends every node that `prefix` followed by `item` stands for; an item may hold several
/// bracketed ranges, as in `r[1-2]n[1-4]`.
fn expand_item(prefix: &str, item: &str, nodes: &mut Vec<String>) -> Option<()> {
    let Some((before, rest)) = item.split_once('[') else {
        let name = format!("{prefix}{item}");
        if name.is_empty() || nodes.len() >= MAX_NODES {
            return None;
        }
        nodes.push(name);
        return Some(());
    };
    let (ranges, after) = rest.split_once(']')?;
    for range in ranges.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        if !first.bytes().chain(last.bytes()).all(|byte| byte.is_ascii_digit()) {
            return None;
        }
        // Leading zeros are part of the name: `001-010` counts 001, 002 … 010.
        let width = first.len();
        let (first, last): (u64, u64) = (first.parse().ok()?, last.parse().ok()?);
        for number in first..=last {
            expand_item(&format!("{prefix}{before}{number:0width$}"), after, nodes)?;
        }
    }
    Some(())
}

/// Expands `2(x3),1` to `2 2 2 1`.
pub(super) fn expand_counts(list: &str) -> Option<Vec<u32>> {
    let mut counts = Vec::new();
    for item in list.split(',') {
        let (count, times) = match item.split_once("(x") {
            Some((count, times)) => (count, times.strip_suffix(')')?.parse().ok()?),
            None => (item, 1),
        };
        if counts.len().saturating_add(times) > MAX_NODES {
            return None;
        }
        counts.extend(std::iter::repeat_n(count.parse::<u32>().ok()?, times));
    }
    Some(counts)
}
