//! Hosts for a benchmark that is not written in Rust.
//!
//!     cargo run --release -p unisono-netlab --example lab -- 4 1000
//!
//! makes four hosts with links of 1,000 Mbit/s, prints a line for each, with its namespace (for `ip netns exec`) and its
//! address, and removes them when its standard input ends.

use std::io::{Read, Write};

use unisono_netlab::{Lab, Link, Rate};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let mut number = |what: &str| -> Result<u64, String> {
        let text = arguments.next().ok_or(format!("{what} is missing"))?;
        let number = text.parse().ok().filter(|number| *number > 0);
        number.ok_or(format!("{what}: expected a number above 0, not {text:?}"))
    };
    let hosts = number("the number of hosts")?;
    let rate = Rate::mbit(number("the rate in Mbit/s")?);
    let lab = Lab::new(usize::try_from(hosts)?, Link::new(rate))?;
    let mut output = std::io::stdout().lock();
    for host in lab.hosts() {
        writeln!(output, "{} {}", host.namespace(), host.address())?;
    }
    output.flush()?;
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}
