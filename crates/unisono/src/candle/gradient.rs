//! A gradient as flat memory, in the order of the parameter's elements.

use candle_core::{CpuStorage, Result, Storage, Tensor, bail};

/// Side of the squares by which a transposed matrix is copied: two of them fit the first cache.
const SQUARE: usize = 32;

/// Calls `take` with the elements of a tensor, copied to `scratch` first if they do not lie in
/// order. A linear layer's gradient is a transposed matrix, so that this is the common case.
pub fn with_flat<R>(
    tensor: &Tensor,
    scratch: &mut Vec<f32>,
    take: impl FnOnce(&[f32]) -> R,
) -> Result<R> {
    let (storage, layout) = tensor.storage_and_layout();
    let Storage::Cpu(CpuStorage::F32(values)) = &*storage else {
        bail!("gradients must be f32 on the CPU, not {:?} on {:?}", tensor.dtype(), tensor.device())
    };
    if let Some((start, end)) = layout.contiguous_offsets() {
        return Ok(take(&values[start..end]));
    }
    match (layout.dims(), layout.stride()) {
        (&[rows, columns], &[1, stride]) => {
            scratch.clear();
            scratch.resize(rows * columns, 0.0);
            transpose(&values[layout.start_offset()..], stride, scratch, rows, columns);
            Ok(take(scratch))
        }
        _ => {
            drop(storage);
            with_flat(&tensor.contiguous()?, scratch, take)
        }
    }
}

/// `into[r][c] = from[c][r]`, where the rows of `from` are `stride` apart.
fn transpose(from: &[f32], stride: usize, into: &mut [f32], rows: usize, columns: usize) {
    for first_column in (0..columns).step_by(SQUARE) {
        let some = first_column..(first_column + SQUARE).min(columns);
        for first_row in (0..rows).step_by(SQUARE) {
            for row in first_row..(first_row + SQUARE).min(rows) {
                let into = &mut into[row * columns..][some.clone()];
                for (into, column) in into.iter_mut().zip(some.clone()) {
                    *into = from[column * stride + row];
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    fn flat(tensor: &Tensor) -> Vec<f32> {
        with_flat(tensor, &mut Vec::new(), |values| values.to_vec()).unwrap()
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
            let expected = tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            assert_eq!(flat(&tensor), expected, "{:?}", tensor.layout());
        }
    }

    #[test]
    fn other_types_are_refused() {
        let tensor = Tensor::zeros(3, candle_core::DType::F64, &Device::Cpu).unwrap();
        assert!(with_flat(&tensor, &mut Vec::new(), |_| ()).is_err());
    }
}
