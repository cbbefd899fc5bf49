//! The flags of models, data and optimizers.

use anyhow::{Context, bail, ensure};
use unisono::optimizer::{LearningRate, OptimizerSpec};
use unisono::relaxed::spec::Level;
use unisono_workload::data::DataSpec;
use unisono_workload::model::ModelSpec;

use super::choices::Schedule;
use super::{ComputationSpec, TrainArgs};

/// The weight decay of AdamW for the perceptron, which learns small data by heart without. Chosen by
/// the mean over eight seeds.
const MLP_DECAY: f64 = 0.3;

/// The largest size of a layer: two such layers make a matrix of 1 GiB.
const WIDEST: usize = 1 << 14;

/// The most milliseconds that a worker replays for a shard: an hour.
const MOST_MS: f64 = 3_600_000.0;

impl TrainArgs {
    pub(super) fn computation(&self) -> anyhow::Result<ComputationSpec> {
        if let Some(spec) = self.model.strip_prefix("replay:") {
            self.refuse_sizes(&["hidden", "channels", "layers", "width", "heads", "context"])?;
            if let Some(ms) = self.compute_ms {
                ensure!(
                    (0.0..=MOST_MS).contains(&ms),
                    "--compute-ms {ms}: give a time of 0 to {MOST_MS}"
                );
            }
            ensure!(self.data.is_none(), "--data: a replayed model looks at none; leave it out");
            let no_checkpoint = "--checkpoint-dir: a replayed model has no weights; leave it out";
            ensure!(self.checkpoint_dir.is_none(), no_checkpoint);
            return Ok(ComputationSpec::Replay {
                spec: spec.to_owned(),
                compute_ms: self.compute_ms,
            });
        }
        let one = [self.layers, self.width, self.heads, self.context].into_iter().flatten();
        if let Some(size) = one
            .chain(self.hidden.iter().copied())
            .chain(self.channels.iter().copied())
            .find(|size| *size > WIDEST)
        {
            bail!("a layer of size {size} is too large; use at most {WIDEST}");
        }
        let mut model = match self.model.as_str() {
            "mlp" => ModelSpec::mlp(),
            "conv" => ModelSpec::conv(),
            "transformer" => ModelSpec::transformer(),
            other => bail!(
                "--model {other}: choose mlp, conv, transformer, or replay: with resnet50, \
                 bert-large, gpt2 or a file"
            ),
        };
        self.refuse_sizes(&["compute-ms"])?;
        self.resize(&mut model)?;
        let data = match (&self.data, &model) {
            (Some(data), _) => data.parse().context("--data")?,
            (None, ModelSpec::Transformer { .. }) => {
                bail!("--model transformer needs a text: add --data text:FILE")
            }
            (None, _) => DataSpec::Digits,
        };
        Ok(ComputationSpec::Learn { model, data })
    }

    /// Refuses those of the flags for sizes that were given, for the model has no use for them.
    pub(super) fn refuse_sizes(&self, unused: &[&str]) -> anyhow::Result<()> {
        let given = [
            ("hidden", !self.hidden.is_empty()),
            ("channels", !self.channels.is_empty()),
            ("layers", self.layers.is_some()),
            ("width", self.width.is_some()),
            ("heads", self.heads.is_some()),
            ("context", self.context.is_some()),
            ("compute-ms", self.compute_ms.is_some()),
        ];
        for (flag, given) in given {
            ensure!(
                !(given && unused.contains(&flag)),
                "--{flag} means nothing to --model {}; leave it out",
                self.model
            );
        }
        Ok(())
    }

    /// Applies the flags for sizes, and refuses those of other models.
    pub(super) fn resize(&self, model: &mut ModelSpec) -> anyhow::Result<()> {
        let set = |into: &mut usize, size: Option<usize>| *into = size.unwrap_or(*into);
        match model {
            ModelSpec::Mlp { hidden } => {
                self.refuse_sizes(&["channels", "layers", "width", "heads", "context"])?;
                if !self.hidden.is_empty() {
                    hidden.clone_from(&self.hidden);
                }
            }
            ModelSpec::Conv { channels, hidden } => {
                self.refuse_sizes(&["layers", "width", "heads", "context"])?;
                ensure!(
                    self.hidden.len() <= 1,
                    "--hidden: conv has one hidden layer; give one size"
                );
                set(hidden, self.hidden.first().copied());
                if !self.channels.is_empty() {
                    channels.clone_from(&self.channels);
                }
            }
            ModelSpec::Transformer { layers, width, heads, context } => {
                self.refuse_sizes(&["hidden", "channels"])?;
                set(layers, self.layers);
                set(width, self.width);
                set(heads, self.heads);
                set(context, self.context);
            }
        }
        Ok(())
    }

    pub(super) fn optimizer(&self, computation: &ComputationSpec) -> OptimizerSpec {
        let usual = match self.strategy.level() {
            Some(Level::Downpour(_)) => "adagrad",
            Some(Level::Hogwild) => "sgd",
            _ => "adamw",
        };
        let mut spec = self.optimizer.unwrap_or_else(|| usual.parse().expect("it exists"));
        let peak = self.learning_rate.unwrap_or(spec.learning_rate().peak());
        let rate = match self.schedule {
            Schedule::Constant => LearningRate::Constant(peak),
            Schedule::Cosine => LearningRate::Cosine {
                peak,
                floor: peak / 10.0,
                warm_up: self.steps / 10,
                steps: self.steps,
            },
        };
        spec = spec.with_learning_rate(rate);
        let usual = match (computation, spec) {
            (
                ComputationSpec::Learn { model: ModelSpec::Mlp { .. }, .. },
                OptimizerSpec::AdamW { .. },
            ) => Some(MLP_DECAY),
            _ => None,
        };
        self.weight_decay.or(usual).map_or(spec, |decay| spec.with_weight_decay(decay))
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Program {
        #[command(flatten)]
        args: TrainArgs,
    }

    fn optimizer(flags: &str) -> String {
        let flags = std::iter::once("unisono").chain(flags.split_whitespace());
        let args = Program::parse_from(flags).args;
        args.optimizer(&args.computation().unwrap()).to_string()
    }

    /// The rows of a table of the documentation, after its head.
    fn rows(head: &str) -> Vec<Vec<&'static str>> {
        let page = include_str!("../../../../../docs/training.md");
        let (_, table) = page.split_once(head).expect("the documentation has this table");
        let lines = table.lines().skip(2).take_while(|line| line.starts_with('|'));
        lines.map(|line| line.trim_matches('|').split('|').map(str::trim).collect()).collect()
    }

    #[test]
    fn the_documented_settings_of_optimizers_are_the_defaults() {
        let rows = rows("| `--optimizer` | learning rate |");
        assert_eq!(rows.len(), OptimizerSpec::NAMES.len());
        for row in rows {
            let [name, rate, others, decay] = row[..] else { panic!("{row:?}") };
            let name = name.trim_matches('`');
            let others = if others.is_empty() { String::new() } else { format!(", {others}") };
            for model in ["mlp", "conv"] {
                let decay = match decay.split_once(", with `mlp` ") {
                    Some((_, of_mlp)) if model == "mlp" => of_mlp,
                    Some((usual, _)) => usual,
                    None => decay,
                };
                assert_eq!(
                    optimizer(&format!("--optimizer {name} --model {model}")),
                    format!("{name}, learning rate {rate}{others}, weight decay {decay}")
                );
            }
        }
        assert!(optimizer("").starts_with("adamw, "));
        assert!(optimizer("--strategy downpour:1,1").starts_with("adagrad, "));
        assert!(optimizer("--strategy hogwild").starts_with("sgd, "));
    }

    #[test]
    fn the_documented_sizes_of_models_are_the_defaults() {
        for row in rows("| `--model` | flags for its size |") {
            let model = row[0].trim_matches('`');
            let Some(flags) = row[1].split('`').nth(1).filter(|_| !model.contains(':')) else {
                continue;
            };
            let built = |flags: &str| {
                let flags = format!("unisono --data text:f --model {model} {flags}");
                format!(
                    "{:?}",
                    Program::parse_from(flags.split_whitespace()).args.computation().unwrap()
                )
            };
            assert_eq!(built(""), built(flags), "{model}");
        }
    }
}
