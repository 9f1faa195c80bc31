// Runs before the first paint, so that the page does not flash in the wrong theme.
"use strict";
(() => {
  try {
    const theme = localStorage.getItem("tq-theme");
    if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
  } catch {
    // Local storage is unavailable, so the page uses the system's theme.
  }
})();
