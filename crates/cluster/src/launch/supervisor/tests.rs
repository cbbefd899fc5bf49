use super::*;

#[test]
fn a_signal_is_the_cause_and_exit_codes_the_consequence() {
    let (exit, killed) = (Ending::Code(3), Ending::Signal(11));
    let [server, first, second] = [Member::Server(0), Member::Rank(0), Member::Rank(1)];
    let failures = [(first, exit), (server, killed), (second, killed)];
    assert_eq!(cause(&failures), Some((server, killed)));
    assert_eq!(cause(&[(second, exit), (first, exit)]), Some((second, exit)));
    assert_eq!(cause(&[]), None);
}
