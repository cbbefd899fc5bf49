//! The flags of codecs.

use anyhow::ensure;
use unisono::codec::{CodecSpec, Rule, Rules};
use unisono::optimizer::OptimizerSpec;
use unisono::sync::strategy::Compression;
use unisono::sync::strategy::StrategySpec;

use super::{CodecChoice, TrainArgs};
use unisono::worker::Consistency;

/// Steps that are not encoded unless the user says how many. Not a share of all, which a run that is resumed
/// may have more of.
const WARM_UP: u64 = 300;

impl TrainArgs {
    /// Whether anything may be encoded.
    pub(super) fn encodes(&self) -> bool {
        self.codec != CodecChoice::None || !self.codec_rule.is_empty()
    }

    /// The codec. One with momentum takes it over from the optimizer.
    pub(super) fn codec(&self, optimizer: &mut OptimizerSpec) -> anyhow::Result<CodecChoice> {
        ensure!(
            self.codec != CodecChoice::Auto || self.agrees_always(),
            "--codec auto predicts runs that synchronize in every step, and --strategy {} does not; \
             name a codec such as int8, or leave it out",
            self.strategy
        );
        let mut codec = self.codec.clone();
        if let CodecChoice::Fixed(CodecSpec::Dgc(settings, _)) = &mut codec
            && self.agrees_always()
            && let OptimizerSpec::Momentum { learning_rate, momentum, nesterov, weight_decay } =
                *optimizer
        {
            ensure!(
                settings.momentum == 0.0,
                "--codec {} and --optimizer momentum have a momentum each; use --optimizer sgd, or \
                 leave it out of the codec",
                self.codec
            );
            settings.momentum = momentum;
            settings.nesterov = nesterov;
            *optimizer = OptimizerSpec::Sgd { learning_rate, weight_decay };
        }
        let has_momentum = |rule: &Rule| matches!(rule.codec(), Some(CodecSpec::Dgc(settings, _)) if settings.momentum > 0.0);
        if let Some(rule) = self.codec_rule.iter().find(|rule| has_momentum(rule)) {
            ensure!(
                !matches!(optimizer, OptimizerSpec::Momentum { .. }),
                "--codec-rule {rule} and --optimizer momentum have a momentum each; use --optimizer \
                 sgd, or leave it out of the rule"
            );
        }
        Ok(codec)
    }

    /// At the beginning gradients change fastest, and what is sent late is worth little.
    pub(super) fn usual_warm_up(&self, codec: &CodecChoice) -> u64 {
        let is_harsh = |codec: &CodecSpec| {
            let harsh = ["sign", "topk", "randk", "dgc", "powersgd"];
            harsh.contains(&codec.name())
        };
        match codec {
            CodecChoice::Fixed(codec)
                if is_harsh(codec)
                    && !matches!(
                        self.strategy,
                        Consistency::Agreeing(StrategySpec::Local(_) | StrategySpec::Diloco(_))
                    ) =>
            {
                WARM_UP
            }
            _ => 0,
        }
    }

    pub(super) fn compression(&self, codec: &CodecChoice) -> Option<Compression> {
        let fixed = match codec {
            CodecChoice::Fixed(codec) => Some(codec.clone()),
            _ => None,
        };
        self.encodes().then(|| Compression {
            rules: Rules { codec: fixed, exceptions: self.codec_rule.clone() },
            auto: *codec == CodecChoice::Auto,
            warm_up: self.codec_warmup.unwrap_or(self.usual_warm_up(codec)),
            error_feedback: !self.no_error_feedback,
            relative: self.codec_relative,
            seed: self.seed,
        })
    }
}
