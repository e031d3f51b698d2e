//! For tests: the smallest executable that a provider can start its helpers from. The product uses `evalgrid` itself.

fn main() {
    evalgrid_sandbox::run_if_helper();
    eprintln!("this program only serves the tests of evalgrid-sandbox");
    std::process::exit(2);
}
