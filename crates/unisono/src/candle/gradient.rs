//! A gradient as candle has it, in the order of the parameter's elements.

use candle_core::{CpuStorage, Result, Storage, Tensor, bail};
use unisono_sync::accumulate::Values;

/// Side of the squares by which a transposed matrix is read: two of them fit the first cache.
const SQUARE: usize = 32;

/// Who wants to see a gradient, in whatever form it is.
pub trait Visitor {
    /// What becomes of it.
    type Output;

    /// Sees the values.
    fn visit(self, values: &impl Values) -> Self::Output;
}

/// Shows the values of a tensor. A linear layer's gradient is a transposed matrix: that is the common
/// case, and is read as it lies. Anything else that does not lie in order is copied first.
pub fn visit<V: Visitor>(tensor: &Tensor, visitor: V) -> Result<V::Output> {
    let (storage, layout) = tensor.storage_and_layout();
    let Storage::Cpu(CpuStorage::F32(values)) = &*storage else {
        bail!("gradients must be f32 on the CPU, not {:?} on {:?}", tensor.dtype(), tensor.device())
    };
    if let Some((start, end)) = layout.contiguous_offsets() {
        return Ok(visitor.visit(&&values[start..end]));
    }
    match (layout.dims(), layout.stride()) {
        (&[rows, columns], &[1, stride]) => {
            let values = &values[layout.start_offset()..];
            Ok(visitor.visit(&Transposed { values, stride, rows, columns }))
        }
        _ => {
            drop(storage);
            visit(&tensor.contiguous()?, visitor)
        }
    }
}

/// A matrix whose columns lie in order, `stride` apart.
struct Transposed<'a> {
    values: &'a [f32],
    stride: usize,
    rows: usize,
    columns: usize,
}

impl Transposed<'_> {
    /// Calls `each` with every element of `into` and the value that belongs there, in squares that
    /// fit the cache.
    fn zip(&self, into: &mut [f32], each: impl Fn(&mut f32, f32)) {
        assert_eq!(into.len(), self.rows * self.columns, "the length of a gradient");
        for first_column in (0..self.columns).step_by(SQUARE) {
            let some = first_column..(first_column + SQUARE).min(self.columns);
            for row in 0..self.rows {
                let into = &mut into[row * self.columns..][some.clone()];
                for (into, column) in into.iter_mut().zip(some.clone()) {
                    each(into, self.values[column * self.stride + row]);
                }
            }
        }
    }
}

impl Values for Transposed<'_> {
    fn store(&self, into: &mut [f32]) {
        self.zip(into, |into, value| *into = value);
    }

    fn add(&self, into: &mut [f32]) {
        self.zip(into, |into, value| *into += value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    /// Stores and adds a gradient.
    struct Twice<'a>(&'a mut Vec<f32>);

    impl Visitor for Twice<'_> {
        type Output = ();

        fn visit(self, values: &impl Values) {
            values.store(self.0);
            values.add(self.0);
        }
    }

    #[test]
    fn any_layout_comes_out_in_order() {
        let count = |n: usize| Tensor::arange(0f32, n as f32, &Device::Cpu).unwrap();
        let matrix = count(70 * 41).reshape((70, 41)).unwrap();
        let cube = count(2 * 3 * 4).reshape((2, 3, 4)).unwrap();
        for tensor in [
            matrix.clone(),
            matrix.t().unwrap(),
            matrix.narrow(0, 3, 50).unwrap().t().unwrap(),
            matrix.narrow(1, 5, 20).unwrap(),
            matrix.narrow(1, 5, 20).unwrap().t().unwrap(),
            cube.transpose(0, 2).unwrap(),
            count(5).reshape((5, 1)).unwrap().broadcast_as((5, 3)).unwrap(),
        ] {
            let values = tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            let expected: Vec<f32> = values.iter().map(|value| value * 2.0).collect();
            let mut into = vec![-1.0; values.len()];
            visit(&tensor, Twice(&mut into)).unwrap();
            assert_eq!(into, expected, "{:?}", tensor.layout());
        }
    }

    #[test]
    fn other_types_are_refused() {
        let tensor = Tensor::zeros(3, candle_core::DType::F64, &Device::Cpu).unwrap();
        assert!(visit(&tensor, Twice(&mut vec![0.0; 3])).is_err());
    }
}
