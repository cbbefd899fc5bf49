//! Which part of the weights lies on which server.
//!
//! A parameter that is larger than a server's fair share is cut along its first dimension into pieces
//! of about equal size, none larger than that share. The pieces, from the largest to the smallest, then
//! each go to the server that has the fewest elements so far. Workers and servers compute the same
//! layout from the same shapes.

use std::ops::Range;

use serde::{Deserialize, Serialize};

/// A part of a parameter: some of its rows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Piece {
    /// The parameter's number.
    pub parameter: usize,
    /// Where it begins in the parameter, in elements.
    pub start: usize,
    /// Its own shape.
    pub shape: Vec<usize>,
}

impl Piece {
    /// Its elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Its bytes; more than there can be, if they cannot be counted.
    pub fn checked_bytes(&self) -> usize {
        let elements = self.shape.iter().try_fold(4usize, |all, rows| all.checked_mul(*rows));
        elements.unwrap_or(usize::MAX)
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Where it lies in its parameter.
    pub fn span(&self) -> Range<usize> {
        self.start..self.start + self.len()
    }
}

/// The pieces of every server, for parameters of these shapes. No server is empty if there are enough
/// rows.
///
/// # Panics
/// If there are no servers.
pub fn spread(shapes: &[Vec<usize>], servers: usize) -> Vec<Vec<Piece>> {
    assert!(servers > 0, "weights need a place");
    let total: usize = shapes.iter().map(|shape| shape.iter().product::<usize>()).sum();
    let fair = total.div_ceil(servers).max(1);
    let mut pieces: Vec<Piece> = Vec::new();
    for (parameter, shape) in shapes.iter().enumerate() {
        pieces.extend(cut(parameter, shape, fair));
    }
    // A stable order, so that equal sizes do not depend on chance.
    pieces.sort_by_key(|piece| (std::cmp::Reverse(piece.len()), piece.parameter, piece.start));
    let mut spread = vec![Vec::new(); servers];
    let mut load = vec![0; servers];
    for piece in pieces {
        let least = (0..servers).min_by_key(|server| (load[*server], *server)).expect("servers");
        load[least] += piece.len();
        spread[least].push(piece);
    }
    for pieces in &mut spread {
        pieces.sort_by_key(|piece: &Piece| (piece.parameter, piece.start));
    }
    spread
}

/// Cuts a parameter into pieces of at most about `fair` elements.
fn cut(parameter: usize, shape: &[usize], fair: usize) -> Vec<Piece> {
    let elements: usize = shape.iter().product();
    let rows = shape.first().copied().unwrap_or(1);
    let count = elements.div_ceil(fair).clamp(1, rows.max(1));
    let row = elements / rows.max(1);
    let piece = |i: usize| {
        let (first, last) = (rows * i / count, rows * (i + 1) / count);
        let mut shape = shape.to_vec();
        if let Some(rows) = shape.first_mut() {
            *rows = last - first;
        }
        Piece { parameter, start: first * row, shape }
    };
    (0..count).map(piece).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_large_matrix_is_cut_by_rows() {
        let spread = spread(&[vec![100, 10], vec![10]], 4);
        assert_eq!(spread.iter().flatten().filter(|piece| piece.parameter == 0).count(), 4);
        assert!(spread.iter().flatten().all(|piece| piece.shape.last() == Some(&10)));
    }

    proptest! {
        #[test]
        fn every_element_lies_on_one_server(
            shapes in proptest::collection::vec(proptest::collection::vec(0usize..20, 0..4), 0..8),
            servers in 1usize..6,
        ) {
            let spread = spread(&shapes, servers);
            prop_assert_eq!(spread.len(), servers);
            for (parameter, shape) in shapes.iter().enumerate() {
                let mut pieces: Vec<&Piece> =
                    spread.iter().flatten().filter(|piece| piece.parameter == parameter).collect();
                pieces.sort_by_key(|piece| piece.start);
                let mut end = 0;
                for piece in pieces {
                    prop_assert_eq!(piece.start, end);
                    end = piece.span().end;
                }
                prop_assert_eq!(end, shape.iter().product::<usize>());
            }
        }

        #[test]
        fn servers_have_about_as_much(
            shapes in proptest::collection::vec((1usize..200, 1usize..8), 8..12),
            servers in 1usize..5,
        ) {
            let shapes: Vec<Vec<usize>> = shapes.into_iter().map(|(r, c)| vec![r, c]).collect();
            let total: usize = shapes.iter().map(|shape| shape.iter().product::<usize>()).sum();
            let largest = spread(&shapes, servers).iter().flatten().map(Piece::len).max().unwrap();
            for pieces in spread(&shapes, servers) {
                let load: usize = pieces.iter().map(Piece::len).sum();
                prop_assert!(load <= total / servers + largest);
            }
        }
    }
}
