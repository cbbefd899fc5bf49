mod common;
use common::{Kind, on_all};
use unisono_collective::{Options, Reduction};

#[test]
fn all_reduce_everywhere() {
    for kind in Kind::ALL {
        for world in [1, 2, 3, 4, 5] {
            eprintln!("{kind:?} {world}");
            let groups = kind.start(world, &Options::default());
            on_all(&groups, |g| {
                for count in [0usize, 1, 3, 1000, 100_000, 1_000_000] {
                    let mut v: Vec<f32> = (0..count).map(|i| (i % 100 + g.rank()) as f32).collect();
                    g.all_reduce(&mut v, Reduction::Sum).unwrap();
                    let base: usize = (0..world).sum();
                    for i in 0..count {
                        assert_eq!(v[i], ((i % 100) * world + base) as f32);
                    }
                }
                g.barrier().unwrap();
            });
        }
    }
}
