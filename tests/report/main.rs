//! The report: its plots, its page, and what is on it.

#[path = "../common/program.rs"]
mod program;
#[path = "../common/shared.rs"]
mod shared;

mod browser;
mod gallery;
mod run;

use std::path::Path;

use browser::{Browser, Look};

#[test]
fn the_same_plots_are_the_same_bytes() {
    assert_eq!(gallery::page().html(), gallery::page().html());
}

const LOOKS: [Look; 4] = [
    Look { width: 1280, dark: false },
    Look { width: 1280, dark: true },
    Look { width: 390, dark: false },
    Look { width: 390, dark: true },
];

/// Nothing is wrong with a page, however it is looked at.
fn flawless(browser: &mut Browser, page: &Path, figures: u64) {
    let mut backs = Vec::new();
    for look in LOOKS {
        let seen = browser.look(page, look);
        assert_eq!(seen.errors, Vec::<String>::new(), "{look:?}");
        assert_eq!(seen.requests, Vec::<String>::new(), "{look:?}");
        assert_eq!(seen.layout, Vec::<String>::new(), "{look:?}");
        assert_eq!(seen.figures, figures, "{look:?}");
        assert_ne!(seen.colors.0, seen.colors.1, "{look:?}");
        assert!(seen.tips.len() > 1 && seen.tips.iter().all(|tip| tip.contains('\n')), "{look:?}: {:?}", seen.tips);
        backs.push(seen.colors.0);
    }
    assert!(backs[0] == backs[2] && backs[1] == backs[3] && backs[0] != backs[1], "light and dark: {backs:?}");
}

#[test]
fn every_plot_in_a_browser() {
    let Some(mut browser) = Browser::start() else { return };
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let page = dir.path().join("gallery.html");
    std::fs::write(&page, gallery::page().html()).unwrap();
    flawless(&mut browser, &page, 7);
}

/// The looking itself finds what can be wrong with a page.
#[test]
fn a_page_that_is_at_fault_is_found_out() {
    let Some(mut browser) = Browser::start() else { return };
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = dir.path().join("faults.html");
    let good = gallery::page().html();
    let mut look = |from: &str, to: &str| {
        assert!(good.contains(from), "{from}");
        std::fs::write(&path, good.replacen(from, to, 1)).unwrap();
        browser.look(&path, LOOKS[2])
    };
    let end = "</main>";
    let seen = look(end, "<script>nothing.at.all</script></main>");
    assert!(seen.errors.iter().any(|e| e.contains("nothing is not defined")), "{seen:?}");
    let seen = look(end, "<script>console.error('so it is')</script></main>");
    assert!(seen.errors.iter().any(|e| e.contains("so it is")), "{seen:?}");
    // Without the page's policy the request goes out, with it the console says so.
    let seen = look(end, "<img src='http://127.0.0.1:9/x.png'></main>");
    assert!(seen.errors.iter().any(|e| e.contains("Content Security Policy")), "{seen:?}");
    let policy = good.find("<meta http-equiv").unwrap()..good.find("<link rel=\"icon\"").unwrap();
    let seen = look(&good[policy], "<img src='http://127.0.0.1:9/x.png'>");
    assert_eq!(seen.requests, ["http://127.0.0.1:9/x.png"]);
    let seen = look(end, "<div style='width: 500px'>wide</div></main>");
    assert!(seen.layout.iter().any(|e| e.contains("the page is")), "{seen:?}");
    let seen = look("</svg></div>", "<text x='350' y='20'>a text that the edge cuts off</text></svg></div>");
    assert!(seen.layout.is_empty(), "that was the drawing for wide pages: {seen:?}");
    let narrow = "<div class=\"scroll narrow\"><svg role=\"img\"";
    let text = "<text x='350' y='60'>a text that the edge cuts off</text><text x='9' y='60'>one</text><text x='9' y='60'>two</text>";
    let at = good.find(narrow).unwrap();
    let open = at
        + good[at..].find("viewBox").unwrap()
        + good[at + good[at..].find("viewBox").unwrap()..].find('>').unwrap()
        + 1;
    let seen = look(&good[at..open], &format!("{}{text}", &good[at..open]));
    assert!(seen.layout.iter().any(|e| e.contains("is cut off")), "{seen:?}");
    assert!(seen.layout.iter().any(|e| e.contains("\"one\" lies on \"two\"")), "{seen:?}");
}
