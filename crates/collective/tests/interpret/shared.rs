//! Memory that the ranks of a host share.

use std::collections::HashMap;
use std::ops::Range;

use super::machine::{At, Clock, Machine, Task, join};
use super::{Arithmetic, Fault};
use unisono_collective::schedule::{Collect, Source, Stage, Window, WindowFold};

/// The staging buffers of a host for one segment of one phase.
pub(super) struct SharedWindow<V> {
    /// How many members have staged.
    staged: usize,
    /// How many have folded.
    folded: usize,
    /// What all members knew when they had staged.
    clock: Clock,
    /// By owner and number.
    cells: HashMap<(usize, u32), Cell<V>>,
}

struct Cell<V> {
    values: Vec<V>,
    published: bool,
}

impl<A: Arithmetic> Machine<'_, A> {
    /// One step of a window.
    pub(super) fn window(
        &mut self,
        rank: usize,
        slot: usize,
        task: &mut Task,
        window: &Window,
    ) -> Result<bool, Fault> {
        let host = self.topology.host(rank);
        let members = self.topology.members(host).len();
        let key = (host, task.phase, task.segment);
        let waits = window.cells > 0;
        let shared = self.windows.entry(key).or_insert_with(|| SharedWindow {
            staged: 0,
            folded: 0,
            clock: vec![0; self.schedules.len()],
            cells: HashMap::new(),
        });
        match task.at {
            At::Stage => {
                for stage in &window.stages {
                    self.stage(rank, slot, task, window, stage)?;
                }
                for copy in &window.copies {
                    self.fold(rank, slot, task, copy)?;
                }
                task.clock[rank] += 1;
                let shared = self.windows.get_mut(&key).expect("just inserted");
                shared.staged += 1;
                join(&mut shared.clock, &task.clock);
                task.at = At::Fold;
            }
            At::Fold => {
                if waits && shared.staged < members {
                    return Ok(false);
                }
                if waits {
                    join(&mut task.clock, &shared.clock);
                }
                for fold in &window.folds {
                    self.window_fold(rank, slot, task, window, fold)?;
                }
                let shared = self.windows.get_mut(&key).expect("just inserted");
                shared.folded += 1;
                task.at = At::Collect;
            }
            At::Collect => {
                if waits && window.publishes && shared.folded < members {
                    return Ok(false);
                }
                for collect in &window.collects {
                    self.collect(rank, slot, task, window, collect)?;
                }
                task.clock[rank] += 1;
                self.next_phase(rank, task);
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    fn stage(
        &mut self,
        rank: usize,
        slot: usize,
        task: &Task,
        window: &Window,
        stage: &Stage,
    ) -> Result<(), Fault> {
        for (number, block) in stage.blocks.clone().enumerate() {
            let from = stage.from.skip(number as u32);
            let spans = self.spans(rank, slot, task, from, &(block..block + 1))?;
            let values = self.ranks[rank].memory.read(&spans).ok_or(Fault::Garbage { rank })?;
            let cell = stage.cell + number as u32;
            self.put(rank, task, window, cell, Cell { values, published: false })?;
        }
        Ok(())
    }

    fn window_fold(
        &mut self,
        rank: usize,
        slot: usize,
        task: &Task,
        window: &Window,
        fold: &WindowFold,
    ) -> Result<(), Fault> {
        for (number, block) in fold.blocks.clone().enumerate() {
            let number = number as u32;
            let blocks = block..block + 1;
            let into = self.spans(rank, slot, task, fold.into.skip(number), &blocks)?;
            let expected = into.iter().map(Range::len).sum();
            let mut inputs = Vec::with_capacity(fold.inputs.len());
            for source in &fold.inputs {
                inputs.push(match *source {
                    Source::Own(place) => {
                        let spans = self.spans(rank, slot, task, place.skip(number), &blocks)?;
                        self.ranks[rank].memory.read(&spans).ok_or(Fault::Garbage { rank })?
                    }
                    Source::Staged { rank: owner, cell } => {
                        self.look(rank, task, owner, cell + number, false, expected)?
                    }
                });
            }
            let values = self.combine(&fold.tree, &inputs, fold.root);
            if let Some(cell) = fold.publish {
                let (cell, values) = (cell + number, values.clone());
                if !window.publishes {
                    return Err(Fault::Staging { rank, owner: rank, cell });
                }
                self.put(rank, task, window, cell, Cell { values, published: true })?;
            }
            self.write(rank, task, &task.clock, &into, values)?;
        }
        Ok(())
    }

    fn collect(
        &mut self,
        rank: usize,
        slot: usize,
        task: &Task,
        window: &Window,
        collect: &Collect,
    ) -> Result<(), Fault> {
        for (number, block) in collect.blocks.clone().enumerate() {
            let number = number as u32;
            let into = collect.into.skip(number);
            let spans = self.spans(rank, slot, task, into, &(block..block + 1))?;
            let expected = spans.iter().map(Range::len).sum();
            let cell = collect.cell + number;
            let values = self.look(rank, task, collect.rank, cell, window.publishes, expected)?;
            self.write(rank, task, &task.clock, &spans, values)?;
        }
        Ok(())
    }

    /// Writes a staging cell, once.
    fn put(
        &mut self,
        rank: usize,
        task: &Task,
        window: &Window,
        cell: u32,
        content: Cell<A::Value>,
    ) -> Result<(), Fault> {
        let key = (self.topology.host(rank), task.phase, task.segment);
        let shared = self.windows.get_mut(&key).expect("a window exists from its first step on");
        let twice = shared.cells.insert((rank, cell), content).is_some();
        if twice || cell >= window.cells {
            return Err(Fault::Staging { rank, owner: rank, cell });
        }
        Ok(())
    }

    /// Reads a staging cell; one that was published only if that is `published_too`.
    fn look(
        &self,
        rank: usize,
        task: &Task,
        owner: usize,
        cell: u32,
        published_too: bool,
        expected: usize,
    ) -> Result<Vec<A::Value>, Fault> {
        let key = (self.topology.host(rank), task.phase, task.segment);
        let content = self.windows[&key].cells.get(&(owner, cell));
        match content.filter(|content| !content.published || published_too) {
            None => Err(Fault::Staging { rank, owner, cell }),
            Some(Cell { values, .. }) if values.len() != expected => {
                Err(Fault::Length { from: owner, to: rank, expected, found: values.len() })
            }
            Some(Cell { values, .. }) => Ok(values.clone()),
        }
    }
}
