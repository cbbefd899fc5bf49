//! throwaway
#[path = "../tests/common/mod.rs"]
mod common;
use common::{Kind, on_all};
use std::time::Instant;
use unisono_collective::{Options, Reduction};
fn main() {
    let a: Vec<String> = std::env::args().collect();
    let kind = match a[1].as_str() { "shm" => Kind::Shm, "tcp" => Kind::Tcp, "hosts" => Kind::LocalHosts, _ => Kind::Local };
    let world: usize = a[2].parse().unwrap();
    let o = Options::from_env().unwrap();
    let groups = kind.start(world, &o);
    let sizes: Vec<usize> = a[3..].iter().map(|s| s.parse::<usize>().unwrap() * 1024).collect();
    let r = on_all(&groups, |g| {
        let mut out = vec![];
        for &s in &sizes {
            let n = s / 4;
            let mut v = vec![1.0f32; n];
            let iters = ((400usize << 20) / s.max(16384)).clamp(8, 20000);
            for _ in 0..iters / 5 + 2 { g.all_reduce(&mut v, Reduction::Mean).unwrap(); }
            let mut t = Vec::with_capacity(iters);
            for _ in 0..iters { let b = Instant::now(); g.all_reduce(&mut v, Reduction::Mean).unwrap(); t.push(b.elapsed().as_secs_f64() * 1e6); }
            assert!(v.iter().all(|x| *x == 1.0));
            t.sort_by(f64::total_cmp);
            out.push((s, t[t.len() / 2], t[t.len() * 99 / 100], t[0]));
        }
        out
    });
    for (s, m, p, z) in &r[0] { println!("{:>8} KiB  median {:>10.2} us  p99 {:>10.2}  min {:>10.2}   {:.2} GB/s", s / 1024, m, p, z, *s as f64 / m / 1e3); }
}
