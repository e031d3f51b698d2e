//! For tests: the smallest executable that sandboxes can be supervised from. The product uses `evalgrid` itself.

fn main() {
    evalgrid_sandbox::run_if_helper();
    eprintln!("this program only serves the tests of evalgrid-judge-runner");
    std::process::exit(2);
}
