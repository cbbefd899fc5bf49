//! The three products of a gradient and thin matrices that a low-rank encoding cannot do without, by a
//! library for nothing else: what such a codec is measured against.
//!
//! With the gradient `M` and a thin `Q`, they are `P = M · Q`, `R = Mᵀ · P` and `P · Rᵀ`. `M` and the
//! last product lie row by row, the thin matrices column by column.

use anyhow::ensure;

/// The thin matrices of one gradient.
pub struct Products {
    rows: usize,
    columns: usize,
    rank: usize,
    q: Vec<f32>,
    p: Vec<f32>,
    r: Vec<f32>,
}

impl Products {
    /// For a gradient of `rows` × `columns`.
    pub fn new(rows: usize, columns: usize, rank: usize) -> Products {
        // Any numbers do that are neither zero nor equal.
        let q = (0..columns * rank).map(|i| 1.0 / (1 + i % 97) as f32).collect();
        Products { rows, columns, rank, q, p: vec![0.0; rows * rank], r: vec![0.0; columns * rank] }
    }

    /// Computes all three, the last one into `product`.
    pub fn multiply(&mut self, gradient: &[f32], product: &mut [f32]) {
        let Products { rows, columns, rank, .. } = *self;
        let matrix = Matrix { data: gradient, rows, columns, layout: Layout::Rows };
        let thin = |data, rows| Matrix { data, rows, columns: rank, layout: Layout::Columns };
        multiply(matrix, thin(&self.q, columns), &mut self.p, Layout::Columns);
        multiply(matrix.transposed(), thin(&self.p, rows), &mut self.r, Layout::Columns);
        multiply(thin(&self.p, rows), thin(&self.r, columns).transposed(), product, Layout::Rows);
    }

    /// Computes some elements of each product again.
    pub fn verify(&self, gradient: &[f32], product: &[f32]) -> anyhow::Result<()> {
        let Products { rows, columns, rank, .. } = *self;
        let m = |i: usize, j: usize| gradient[i * columns + j];
        for sample in 0..4 {
            let (i, j, k) = (sample * (rows - 1) / 3, sample * (columns - 1) / 3, sample % rank);
            let terms = (0..columns).map(|j| (m(i, j), self.q[k * columns + j]));
            check("M · Q", self.p[k * rows + i], terms)?;
            let terms = (0..rows).map(|i| (m(i, j), self.p[k * rows + i]));
            check("Mᵀ · P", self.r[k * columns + j], terms)?;
            let terms = (0..rank).map(|k| (self.p[k * rows + i], self.r[k * columns + j]));
            check("P · Rᵀ", product[i * columns + j], terms)?;
        }
        Ok(())
    }
}

/// Compares a sum with that of its terms, as precisely as f32 can add up that many.
fn check(product: &str, found: f32, terms: impl Iterator<Item = (f32, f32)>) -> anyhow::Result<()> {
    let (mut expected, mut size) = (0.0, 0.0);
    for (a, b) in terms {
        let term = f64::from(a) * f64::from(b);
        expected += term;
        size += term.abs();
    }
    let difference = (f64::from(found) - expected).abs();
    ensure!(difference <= 1e-4 * size, "{product} has {found} where {expected} belongs");
    Ok(())
}

/// In which direction neighbours in memory lie.
#[derive(Clone, Copy)]
enum Layout {
    Rows,
    Columns,
}

#[derive(Clone, Copy)]
struct Matrix<'a> {
    data: &'a [f32],
    rows: usize,
    columns: usize,
    layout: Layout,
}

impl Matrix<'_> {
    fn transposed(self) -> Self {
        let layout = match self.layout {
            Layout::Rows => Layout::Columns,
            Layout::Columns => Layout::Rows,
        };
        Matrix { rows: self.columns, columns: self.rows, layout, ..self }
    }
}

/// The distances in memory between neighbouring columns and neighbouring rows.
fn strides(rows: usize, columns: usize, layout: Layout) -> (isize, isize) {
    match layout {
        Layout::Rows => (1, columns as isize),
        Layout::Columns => (rows as isize, 1),
    }
}

/// `product = left · right`, on this thread.
fn multiply(left: Matrix, right: Matrix, product: &mut [f32], layout: Layout) {
    let (rows, depth, columns) = (left.rows, left.columns, right.columns);
    assert_eq!(depth, right.rows, "matrices that can be multiplied");
    assert_eq!(left.data.len(), rows * depth);
    assert_eq!(right.data.len(), depth * columns);
    assert_eq!(product.len(), rows * columns);
    let (left_cs, left_rs) = strides(left.rows, left.columns, left.layout);
    let (right_cs, right_rs) = strides(right.rows, right.columns, right.layout);
    let (product_cs, product_rs) = strides(rows, columns, layout);
    // SAFETY: the strides of a dense matrix of its sizes reach every element of each of the three
    // slices and none beyond, for their lengths were just compared with those sizes; and the product
    // is borrowed exclusively, so that it overlaps neither factor.
    unsafe {
        gemm::gemm(
            rows,
            columns,
            depth,
            product.as_mut_ptr(),
            product_cs,
            product_rs,
            false,
            left.data.as_ptr(),
            left_cs,
            left_rs,
            right.data.as_ptr(),
            right_cs,
            right_rs,
            0.0,
            1.0,
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_are_right_and_wrong_ones_noticed() {
        for (rows, columns, rank) in [(1, 1, 1), (7, 5, 2), (64, 33, 4)] {
            let gradient: Vec<f32> = (0..rows * columns).map(|i| (i % 11) as f32 - 4.0).collect();
            let mut products = Products::new(rows, columns, rank);
            let mut product = vec![f32::NAN; rows * columns];
            products.multiply(&gradient, &mut product);
            products.verify(&gradient, &product).unwrap();
            product[0] += 1e3;
            assert!(products.verify(&gradient, &product).is_err());
        }
    }
}
