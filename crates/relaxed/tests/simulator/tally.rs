//! How often what happened, over many runs: a fault that never happens proves nothing.

macro_rules! tally {
    ($($(#[$doc:meta])* $name:ident),+ $(,)?) => {
        #[derive(Clone, Copy, Debug, Default)]
        pub struct Tally {
            $($(#[$doc])* pub $name: u64,)+
        }

        impl Tally {
            pub fn add(&mut self, other: &Tally) {
                $(self.$name += other.$name;)+
            }

            /// What has not happened.
            pub fn missing(&self) -> Vec<&'static str> {
                let all = [$((stringify!($name), self.$name)),+];
                all.into_iter().filter(|(_, count)| *count == 0).map(|(name, _)| name).collect()
            }
        }
    };
}

tally! {
    events,
    /// Reads that were admitted.
    reads,
    /// Times that a read had to go on waiting.
    held,
    settled,
    /// Pushes that were too old, or late for their round.
    dropped,
    duplicates,
    /// Pushes of which a worker learned by joining again that they were settled.
    known_by_joining,
    expired,
    superseded,
    /// Entries that were repeated after a crash.
    repeated,
    /// Messages that were lost, without or with their connection.
    lost,
    doubled,
    breaks,
    reconnects,
    worker_crashes,
    worker_deaths,
    pauses,
    replacements,
    server_crashes,
    snapshots,
}
