//! The report: its plots, its page, and what is on it.

mod gallery;

#[test]
fn the_same_plots_are_the_same_bytes() {
    let page = gallery::page().html();
    assert_eq!(page, gallery::page().html());
    if let Ok(path) = std::env::var("HOTSET_GALLERY") {
        std::fs::write(path, page).unwrap();
    }
}
