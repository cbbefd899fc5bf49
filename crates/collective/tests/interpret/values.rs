//! What schedules compute with.

use std::collections::HashMap;
use std::ops::Range;

use unisono_collective::tree::split;

/// How elements of several ranks become one.
pub trait Arithmetic {
    /// An element.
    type Value: Copy + PartialEq + std::fmt::Debug;
    /// `left ⊕ right`.
    fn combine(&mut self, left: Self::Value, right: Self::Value) -> Self::Value;
    /// What happens once, at the root: the division of a mean.
    fn root(&mut self, value: Self::Value) -> Self::Value;
}

/// The mean of single-precision floats.
#[derive(Clone, Copy, Debug)]
pub struct Floats {
    /// The number of ranks.
    pub world: usize,
}

impl Arithmetic for Floats {
    type Value = f32;
    fn combine(&mut self, left: f32, right: f32) -> f32 {
        left + right
    }
    fn root(&mut self, value: f32) -> f32 {
        value / self.world as f32
    }
}

/// An expression of [`Symbols`]; equal if and only if the expressions are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Symbol(u32);

/// How a value came about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Expression {
    /// An element of a rank's input.
    Leaf {
        /// The rank.
        rank: usize,
        /// The element.
        index: usize,
    },
    /// A combination, left and right.
    Combine(Symbol, Symbol),
    /// The root of a reduction.
    Root(Symbol),
}

/// Expressions instead of values, each stored once.
#[derive(Clone, Debug, Default)]
pub struct Symbols {
    expressions: Vec<Expression>,
    known: HashMap<Expression, Symbol>,
}

impl Symbols {
    /// An element of a rank's input.
    pub fn leaf(&mut self, rank: usize, index: usize) -> Symbol {
        self.intern(Expression::Leaf { rank, index })
    }

    /// The canonical reduction of element `index` over a range of ranks.
    pub fn canonical(&mut self, ranks: Range<usize>, index: usize) -> Symbol {
        if ranks.len() == 1 {
            return self.leaf(ranks.start, index);
        }
        let mid = split(ranks.clone());
        let left = self.canonical(ranks.start..mid, index);
        let right = self.canonical(mid..ranks.end, index);
        self.combine(left, right)
    }

    /// How a value came about.
    pub fn expression(&self, symbol: Symbol) -> Expression {
        self.expressions[symbol.0 as usize]
    }

    /// All leaves of an expression, as (rank, index), from left to right; `None` if a reduction
    /// ended inside it.
    pub fn leaves(&self, symbol: Symbol) -> Option<Vec<(usize, usize)>> {
        let mut leaves = Vec::new();
        let mut pending = vec![symbol];
        while let Some(symbol) = pending.pop() {
            match self.expression(symbol) {
                Expression::Leaf { rank, index } => leaves.push((rank, index)),
                Expression::Combine(left, right) => pending.extend([right, left]),
                Expression::Root(_) => return None,
            }
        }
        Some(leaves)
    }

    fn intern(&mut self, expression: Expression) -> Symbol {
        *self.known.entry(expression).or_insert_with(|| {
            self.expressions.push(expression);
            Symbol(self.expressions.len() as u32 - 1)
        })
    }
}

impl Arithmetic for Symbols {
    type Value = Symbol;
    fn combine(&mut self, left: Symbol, right: Symbol) -> Symbol {
        self.intern(Expression::Combine(left, right))
    }
    fn root(&mut self, value: Symbol) -> Symbol {
        self.intern(Expression::Root(value))
    }
}
