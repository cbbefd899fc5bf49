//! What a rank and its helpers share, and how they use it.

/// What a rank and its helpers share. Implemented on real memory, and on a model checker's in the tests.
pub trait Board {
    /// What helpers need to know of a job.
    type Job;
    /// The word: the number of the job, and in the lowest 16 bits how many of its parts nobody has taken.
    fn word(&self) -> u64;
    /// Writes the word; sequentially consistent with [`Board::sleepers`].
    fn set_word(&self, word: u64);
    /// Replaces the word by the next smaller one, if it still is `word`.
    fn take(&self, word: u64) -> bool;
    /// Writes down what helpers need to know; visible with the next word.
    fn set_job(&self, job: Self::Job);
    /// What was written down last.
    fn job(&self) -> Self::Job;
    /// Sets how many parts are unfinished.
    fn set_unfinished(&self, parts: u32);
    /// One part less is unfinished; who sees that sees what the part has written.
    fn finish(&self);
    /// How many parts are unfinished.
    fn unfinished(&self) -> u32;
    /// How many helpers sleep, or are about to.
    fn sleepers(&self) -> u32;
    /// Announces a sleeper and sleeps while `is_idle`, which is looked at after the announcement and before every
    /// sleep; may return early.
    fn sleep(&self, is_idle: impl Fn() -> bool);
    /// Wakes all sleepers.
    fn wake(&self);
    /// Whether the helpers are to end.
    fn is_closed(&self) -> bool;
    /// One turn of a helper's busy wait; `false` when it is time to sleep.
    fn spin(&self, turn: u32) -> bool;
    /// One turn of the wait for the last parts.
    fn linger(&self, turn: u32);
}

/// The bits of the word that count parts.
const PARTS_LEFT: u64 = 0xffff;

/// Does a job of so many parts, with the helpers that come. `work` is called for some of the parts; for the
/// others, a helper does the job that was written down.
pub fn share<B: Board>(board: &B, job: B::Job, parts: u32, mut work: impl FnMut(usize)) {
    assert!(0 < parts && u64::from(parts) <= PARTS_LEFT);
    board.set_job(job);
    board.set_unfinished(parts);
    let number = (board.word() | PARTS_LEFT).wrapping_add(1);
    board.set_word(number | u64::from(parts));
    if board.sleepers() > 0 {
        board.wake();
    }
    // Also if the work panics: helpers use the memory of a job until its last part is finished.
    let _end = End { board };
    while let Some(part) = take_part(board) {
        let _finish = Finish { board };
        work(part);
    }
}

/// Does parts of jobs, by `work`, until the board is closed or `is_enough`.
pub fn serve<B: Board>(
    board: &B,
    is_enough: impl Fn() -> bool,
    mut work: impl FnMut(B::Job, usize),
) {
    let mut turn = 0;
    while !board.is_closed() && !is_enough() {
        let word = board.word();
        if word & PARTS_LEFT == 0 {
            if board.spin(turn) {
                turn += 1;
            } else {
                let is_over = || board.is_closed() || is_enough();
                board.sleep(|| board.word() & PARTS_LEFT == 0 && !is_over());
                turn = 0;
            }
            continue;
        }
        turn = 0;
        // The next job is written down only when all parts of this one are finished. So if a part of it can still be taken,
        // what was read is what belongs to it.
        let job = board.job();
        if board.take(word) {
            let _finish = Finish { board };
            work(job, (word & PARTS_LEFT) as usize - 1);
        }
    }
}

fn take_part(board: &impl Board) -> Option<usize> {
    loop {
        let word = board.word();
        let left = word & PARTS_LEFT;
        if left == 0 {
            return None;
        }
        if board.take(word) {
            return Some(left as usize - 1);
        }
    }
}

/// A part is finished, also by a panic.
struct Finish<'a, B: Board> {
    board: &'a B,
}

impl<B: Board> Drop for Finish<'_, B> {
    fn drop(&mut self) {
        self.board.finish();
    }
}

/// The end of a job: nobody takes parts any more, and all that were taken are finished.
struct End<'a, B: Board> {
    board: &'a B,
}

impl<B: Board> Drop for End<'_, B> {
    fn drop(&mut self) {
        // After a panic there are parts left; whoever takes them has nothing to do.
        while take_part(self.board).is_some() {
            self.board.finish();
        }
        let mut turn = 0;
        while self.board.unfinished() > 0 {
            self.board.linger(turn);
            turn = turn.saturating_add(1);
        }
    }
}
