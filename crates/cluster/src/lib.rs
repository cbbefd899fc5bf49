//! Who is in the job: a process's [`place`], what a [`worker`] is told that need not meet the others, the [`rendezvous`] at which the ranks find each
//! other, and the [`launch`]er that starts them.

pub mod checkpoint;
pub mod etcd;
pub mod launch;
pub mod membership;
pub mod place;
pub mod rendezvous;
pub mod variables;
pub mod worker;
