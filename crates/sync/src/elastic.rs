//! Which settings suit workers that may come and go.

use crate::strategy::StrategySpec;
use crate::synchronizer::Settings;

/// Why workers with these settings cannot come and go. Nothing has happened yet.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum NotElastic {
    /// With streams or a delay some of the weights are always under way, so that there is no moment at which all
    /// workers have the same. Leave both out.
    #[error(
        "{strategy} always has weights under way, which are lost with a worker; leave out its streams and its \
         delay, or use a job whose workers do not change"
    )]
    UnderWay {
        /// The strategy.
        strategy: StrategySpec,
    },
    /// What a codec leaves out of local steps is with the worker that made them, and lost with it. Leave the codec
    /// out.
    #[error(
        "{strategy} with a codec remembers what each worker has left out, which is lost with the worker; leave \
         out the codec, or use a job whose workers do not change"
    )]
    Encoded {
        /// The strategy.
        strategy: StrategySpec,
    },
}

impl Settings {
    /// Refuses what workers that may come and go cannot do. With all-reduce they can do everything.
    pub fn expect_elastic(&self) -> Result<(), NotElastic> {
        let strategy = self.strategy;
        match strategy {
            StrategySpec::AllReduce => Ok(()),
            StrategySpec::Diloco(diloco) if diloco.streams() > 1 || diloco.delay() > 0 => {
                Err(NotElastic::UnderWay { strategy })
            }
            _ if self.compression.is_some() => Err(NotElastic::Encoded { strategy }),
            StrategySpec::Local(_) | StrategySpec::Diloco(_) => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::strategy::Compression;

    #[test]
    fn local_steps_are_elastic_where_all_workers_agree_on_all_weights_at_once() {
        let settings = |strategy: &str, codec: Option<&str>| Settings {
            strategy: strategy.parse().unwrap(),
            compression: codec.map(|codec| Compression::new(codec.parse().unwrap())),
            ..Settings::new(4)
        };
        for (strategy, codec) in [
            ("all-reduce", None),
            ("all-reduce", Some("int8")),
            ("local:4", None),
            ("local:4..8", None),
            ("diloco:4", None),
        ] {
            assert_eq!(settings(strategy, codec).expect_elastic(), Ok(()), "{strategy}");
        }
        for strategy in ["diloco:4,delay=1", "diloco:4,streams=2", "diloco:4,streams=2,delay=0"] {
            for codec in [None, Some("int8")] {
                let refused = settings(strategy, codec).expect_elastic();
                assert!(matches!(refused, Err(NotElastic::UnderWay { .. })), "{strategy}");
            }
        }
        for strategy in ["local:4", "diloco:4"] {
            let refused = settings(strategy, Some("fp16")).expect_elastic();
            assert!(matches!(refused, Err(NotElastic::Encoded { .. })), "{strategy}");
        }
    }
}
