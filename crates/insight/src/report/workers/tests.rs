use super::*;
use crate::membership::{Event, FirstStep, Happening};

fn timeline() -> Timeline {
    Timeline::of(&crate::membership::tests::events()).unwrap()
}

/// A thousand workers, one of which is killed ten thousand times.
fn busy() -> Timeline {
    let id = |number, life| WorkerId { number, life };
    let mut events: Vec<Event> = Vec::new();
    let mut add = |at, what| events.push(Event { at, what });
    let members = |life| (0..1000).map(|n| id(n, if n == 777 { life } else { 0 })).collect();
    (0..1000).for_each(|n| add(0.0, Happening::Started { worker: id(n, 0), pid: n }));
    for life in 0..10_000 {
        let at = f64::from(life);
        let (worker, epoch) = (id(777, life), u64::from(life) + 1);
        add(at, Happening::Started { worker, pid: life });
        add(at, Happening::Epoch { epoch, members: members(life) });
        add(
            at + 0.1,
            Happening::Stepped(FirstStep {
                epoch,
                step: epoch,
                compute: 0.0,
                redone: false,
                behind: 0,
                from_checkpoint: true,
                recovery: (life > 0).then_some(at / 1e5),
            }),
        );
        add(at + 0.3, Happening::Ended { worker, code: None, signal: Some(9) });
    }
    Timeline::of(&events).unwrap()
}

#[test]
fn rows_show_what_each_worker_was() {
    // A column is half a second.
    let rows = rows(&timeline(), 64, 40);
    assert_eq!(rows.len(), 3);
    let calm = format!("{}{}g", "s".repeat(2), "m".repeat(37));
    assert_eq!((rows[0].workers, &rows[0].cells), ((0, 0), &calm));
    let lost = format!("ss{}ssss{}g", "m".repeat(18), "m".repeat(15));
    assert_eq!((&rows[1].cells, &rows[1].begins[..]), (&lost, &[20][..]));
}

#[test]
fn many_workers_and_kills_stay_readable() {
    let workers = Workers::of(&busy());
    assert_eq!(workers.rows.len(), ROWS);
    assert!(workers.rows.iter().all(|row| row.cells.len() == COLUMNS));
    assert!(workers.epochs.len() <= MARKS && workers.recoveries.len() <= MARKS);
    assert_eq!(workers.epochs.last().unwrap().last, 10_000);
    assert_eq!(workers.recoveries.iter().map(|mark| mark.count).sum::<usize>(), 9_999);
    assert_eq!((workers.listed.len(), workers.recoveries_in_all), (LISTED, 9_999));
    // The one that is gone most of the time does not vanish among its neighbours.
    let busy_row = |row: &&Row| (row.workers.0..=row.workers.1).contains(&777);
    let (killed, others): (Vec<&Row>, Vec<_>) = workers.rows.iter().partition(busy_row);
    assert!(killed[0].cells.contains('g') && !killed[0].begins.is_empty());
    assert!(others.iter().all(|row| row.begins.is_empty() && !row.cells.contains('g')));
    let size = serde_json::to_string(&workers).unwrap().len();
    assert!(size < 100_000, "{size} bytes");
}

#[test]
fn the_terminal_has_rows_members_and_recoveries() {
    let mut out = Text::new(100);
    terminal(&timeline(), &mut out);
    let text = out.text;
    assert!(text.contains("Workers over 20.0 s"), "{text}");
    let row = text.lines().find(|line| line.contains("worker 1 ")).unwrap();
    assert!(row.contains('█') && row.contains('│') && row.ends_with('·'), "{text}");
    let members = text.lines().find(|line| line.contains("members ")).unwrap();
    assert_eq!(members.split_whitespace().collect::<Vec<_>>(), ["members", "3", "2", "3"]);
    assert!(text.contains("10.1 s"), "{text}");
    let cost = "worker 1: step computed again, 1 worker given state";
    assert!(text.contains("48.0 ms") && text.contains(cost), "{text}");
    assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");

    let mut out = Text::new(60);
    terminal(&busy(), &mut out);
    let text = out.text;
    assert!(text.lines().count() < TERMINAL_ROWS + 4 * LISTED, "{text}");
    assert!(text.contains("The 16 longest of 9,999 recoveries:"), "{text}");
    assert!(text.contains("checkpoint"), "{text}");
}
