//! Gradients in units of their usual size.
//!
//! An adaptive optimizer divides every element of a gradient by how large that element usually is. An
//! error that is small against the largest element of a block may then be large against its own, and
//! what a codec takes for the most important elements is not what the optimizer does. So gradients
//! for such an optimizer are divided before they are encoded, and multiplied after they are decoded,
//! by the root of a running mean square of the means that came out so far. These are equal on all
//! workers, so the scale is, too, and does not travel. Residuals are kept in these units.

/// The factor by which the past fades per step. Larger: slower to notice a change. Smaller: follows the
/// noise of single steps.
const FADES: f32 = 0.99;

/// The smallest unit, as a share of the parameter's typical one. Elements that have hardly had a
/// gradient yet would otherwise be worth more than all others.
const LEAST: f32 = 0.01;

/// How large the elements of a parameter's gradient usually are.
#[derive(Clone, Debug, Default)]
pub struct Scale {
    /// By element: the root of the mean square.
    pub usual: Vec<f32>,
    least: f32,
}

impl Scale {
    /// Nothing is known yet of as many elements.
    pub fn new(elements: usize) -> Scale {
        Scale { usual: vec![0.0; elements], least: 1.0 }
    }

    /// Goes on with what was known.
    pub fn restore(&mut self, usual: Vec<f32>) {
        self.usual = usual;
        self.find_least();
    }

    /// Divides a gradient by the usual.
    pub fn divide(&self, gradient: &mut [f32]) {
        let least = self.least;
        gradient.iter_mut().zip(&self.usual).for_each(|(g, usual)| *g /= usual.max(least));
    }

    /// Multiplies by the usual what was divided by it.
    pub fn multiply(&self, gradient: &mut [f32]) {
        let least = self.least;
        gradient.iter_mut().zip(&self.usual).for_each(|(g, usual)| *g *= usual.max(least));
    }

    /// Takes note of the mean gradient of a step, counted from 0.
    pub fn note(&mut self, step: u64, mean: &[f32]) {
        // At first, a plain mean over the steps so far.
        let fades = FADES.min(step as f32 / (step + 1) as f32);
        for (usual, mean) in self.usual.iter_mut().zip(mean) {
            *usual = (fades * *usual * *usual + (1.0 - fades) * mean * mean).sqrt();
        }
        self.find_least();
    }

    fn find_least(&mut self) {
        let mut lanes = [0f32; 16];
        let (chunks, rest) = self.usual.as_chunks::<16>();
        for chunk in chunks {
            for (lane, usual) in lanes.iter_mut().zip(chunk) {
                *lane += usual * usual;
            }
        }
        let sum = lanes.iter().sum::<f32>() + rest.iter().map(|usual| usual * usual).sum::<f32>();
        let typical = (sum / self.usual.len().max(1) as f32).sqrt();
        // Without any gradient so far, there is nothing to be relative to.
        self.least = if typical > 0.0 { typical * LEAST } else { 1.0 };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_become_alike_and_come_back() {
        let mut scale = Scale::new(3);
        let mut first = [5.0, -2.0, 0.0];
        scale.divide(&mut first);
        assert_eq!(first, [5.0, -2.0, 0.0], "nothing is known at first");
        for step in 0..50 {
            scale.note(step, &[100.0, -0.1, 0.0]);
        }
        let mut gradient = [50.0, 0.2, 1e-3];
        let least = scale.least;
        scale.divide(&mut gradient);
        assert!((gradient[0] - 0.5).abs() < 1e-3, "{gradient:?}");
        assert_eq!(gradient[1], 0.2 / least, "small ones count as the least");
        scale.multiply(&mut gradient);
        for (back, value) in gradient.iter().zip([50.0, 0.2, 1e-3]) {
            assert!((back - value).abs() <= value * 1e-6);
        }
    }

    #[test]
    fn what_is_restored_is_what_was() {
        let mut scale = Scale::new(100);
        let mean: Vec<f32> = (0..100).map(|i| i as f32).collect();
        scale.note(0, &mean);
        let mut other = Scale::new(100);
        other.restore(scale.usual.clone());
        assert_eq!((other.usual, other.least), (scale.usual, scale.least));
    }
}
