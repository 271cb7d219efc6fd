//! Steps written as formulas over the state, turned into rows of factors.
//!
//! R1. A solver computes its scalars in the precision and order of diffusers and combines them here in float64; what goes into an
//!     [`Update`] is rounded once.
//! R2. Slots that no step reads are left out, whatever a solver reserved.

use crate::{SamplerError, Schedule, Update, config::Solver, discrete::Discrete};
use std::ops::{Add, Mul, Sub};

/// A sum of slots, prediction and noise, each times a factor.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Form(Vec<f64>);

impl Add for Form {
    type Output = Self;

    fn add(mut self, other: Self) -> Self {
        self.0.iter_mut().zip(other.0).for_each(|(a, b)| *a += b);
        self
    }
}

impl Sub for Form {
    type Output = Self;

    fn sub(mut self, other: Self) -> Self {
        self.0.iter_mut().zip(other.0).for_each(|(a, b)| *a -= b);
        self
    }
}

impl Mul<&Form> for f64 {
    type Output = Form;

    fn mul(self, form: &Form) -> Form {
        // What is not there stays so, also where the factor is infinite; a factor that is none is found by its other terms.
        let times = |x: &f64| if *x == 0.0 { 0.0 } else { self * x };
        Form(form.0.iter().map(times).collect())
    }
}

impl Mul<&Form> for f32 {
    type Output = Form;

    fn mul(self, form: &Form) -> Form {
        f64::from(self) * form
    }
}

/// What a step computes with.
#[derive(Clone, Debug)]
pub(crate) struct Terms {
    pub(crate) latents: Form,
    pub(crate) kept: Vec<Form>,
    pub(crate) prediction: Form,
    pub(crate) noise: Form,
    /// Nothing.
    pub(crate) zero: Form,
}

/// Steps so far.
#[derive(Debug)]
pub(crate) struct Program {
    n_kept: usize,
    steps: Vec<Vec<Form>>,
}

impl Program {
    pub(crate) fn new(n_kept: usize) -> Self {
        Self {
            n_kept,
            steps: Vec::new(),
        }
    }

    pub(crate) fn terms(&self) -> Terms {
        let n = self.n_kept + 3;
        let unit = |idx: usize| Form((0..n).map(|i| f64::from(u8::from(i == idx))).collect());
        Terms {
            latents: unit(0),
            kept: (1..=self.n_kept).map(unit).collect(),
            prediction: unit(n - 2),
            noise: unit(n - 1),
            zero: Form(vec![0.0; n]),
        }
    }

    /// The next step: what becomes of the latents and of every kept slot.
    pub(crate) fn push(&mut self, latents: Form, kept: Vec<Form>) {
        debug_assert_eq!(kept.len(), self.n_kept);
        let mut slots = vec![latents];
        slots.extend(kept);
        self.steps.push(slots);
    }

    /// The updates and the number of slots that they keep.
    pub(crate) fn finish(self) -> (Vec<Update>, usize) {
        let mut is_read = vec![false; self.n_kept + 1];
        is_read[0] = true;
        loop {
            let before = is_read.clone();
            for slots in &self.steps {
                for (_, form) in slots.iter().enumerate().filter(|(slot, _)| before[*slot]) {
                    for (slot, flag) in is_read.iter_mut().enumerate() {
                        *flag |= form.0[slot] != 0.0;
                    }
                }
            }
            if before == is_read {
                break;
            }
        }
        let keep = |column: usize| is_read.get(column).copied().unwrap_or(true);
        let row = |form: &Form| {
            let factors = form.0.iter().enumerate();
            let kept = factors.filter(|(column, _)| keep(*column));
            kept.map(|(_, factor)| *factor as f32).collect()
        };
        let update = |slots: &Vec<Form>| Update {
            rows: slots
                .iter()
                .enumerate()
                .filter(|(slot, _)| is_read[*slot])
                .map(|(_, form)| row(form))
                .collect(),
        };
        let updates = self.steps.iter().map(update).collect();
        (updates, is_read.iter().filter(|flag| **flag).count() - 1)
    }
}

/// What of a schedule does not depend on where it begins: one entry per evaluation.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) timesteps: Vec<f32>,
    pub(crate) input_scales: Vec<f32>,
    /// One more than evaluations.
    pub(crate) sigmas: Vec<f32>,
    /// Factors of a picture's latents and of noise at each evaluation.
    pub(crate) levels: Vec<[f32; 2]>,
    pub(crate) init_noise_scale: f32,
}

impl Plan {
    /// Of a solver whose latents have unit variance at every timestep.
    pub(crate) fn of_timesteps(discrete: &Discrete, timesteps: &[usize]) -> Self {
        let sigma = |timestep: &usize| {
            let alpha = discrete.alphas_cumprod[*timestep];
            ((1.0 - alpha) / alpha).sqrt()
        };
        let mut sigmas: Vec<f32> = timesteps.iter().map(sigma).collect();
        sigmas.push(0.0);
        Self {
            timesteps: timesteps.iter().map(|t| *t as f32).collect(),
            input_scales: vec![1.0; timesteps.len()],
            sigmas,
            levels: timesteps.iter().map(|t| discrete.level(*t)).collect(),
            init_noise_scale: 1.0,
        }
    }

    /// The schedule from evaluation `first` on, whose steps are in `program`; refused if a factor is not finite.
    pub(crate) fn schedule(
        self,
        solver: Solver,
        n_steps: usize,
        first: usize,
        program: Program,
    ) -> Result<Schedule, SamplerError> {
        let (updates, n_kept) = program.finish();
        let start = self.levels.get(first).copied().unwrap_or([1.0, 0.0]);
        let mut renoise: Vec<[f32; 2]> = self.levels.into_iter().skip(first + 1).collect();
        renoise.push([1.0, 0.0]);
        let schedule = Schedule {
            timesteps: self.timesteps.into_iter().skip(first).collect(),
            input_scales: self.input_scales.into_iter().skip(first).collect(),
            sigmas: self.sigmas.into_iter().skip(first).collect(),
            updates,
            n_kept,
            init_noise_scale: self.init_noise_scale,
            start,
            renoise,
        };
        let mut steps = schedule.timesteps.iter().zip(&schedule.updates);
        let is_finite = |(timestep, update): (&f32, &Update)| {
            timestep.is_finite() && update.rows.iter().flatten().all(|factor| factor.is_finite())
        };
        match steps.position(|step| !is_finite(step)) {
            None => Ok(schedule),
            Some(step_idx) => Err(solver.step_count(
                n_steps,
                format!(
                    "a number whose step {} has both signal and noise to tell apart",
                    first + step_idx + 1
                ),
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_that_no_step_reads_are_left_out() {
        let mut program = Program::new(3);
        for _ in 0..2 {
            let t = program.terms();
            // Slot 1 is written and never read, slot 2 passes slot 3 on to the latents.
            let latents = 0.5 * &t.latents + 2.0 * &t.kept[1];
            program.push(
                latents,
                vec![t.prediction.clone(), t.kept[2].clone(), t.noise.clone()],
            );
        }
        let (updates, n_kept) = program.finish();
        assert_eq!(n_kept, 2);
        let rows = vec![
            vec![0.5, 2.0, 0.0, 0.0, 0.0],
            vec![0.0, 0.0, 1.0, 0.0, 0.0],
            vec![0.0, 0.0, 0.0, 0.0, 1.0],
        ];
        assert_eq!(updates, vec![Update { rows }; 2]);
    }
}
