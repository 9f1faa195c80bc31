// Runs before the first paint: the page must not flash in the theme that was not chosen.
"use strict";
(() => {
  try {
    const theme = localStorage.getItem("tq-theme");
    if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
  } catch {
    // No storage here: the theme is that of the system.
  }
})();
