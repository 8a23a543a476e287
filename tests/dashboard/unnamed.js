// What a screen reader would find without a name.
const said = (e) => (e.getAttribute("aria-label") || e.textContent || e.title || "").trim()
  || (e.labels && [...e.labels].map((l) => l.textContent).join("").trim())
  || (e.getAttribute("aria-labelledby") && document.getElementById(e.getAttribute("aria-labelledby"))?.textContent.trim());
return [...document.querySelectorAll("button, a, input, select, [role=tab], [role=tabpanel], [role=radiogroup], svg[role=img], dialog, [role=region]")]
  .filter((e) => e.checkVisibility() && !said(e)).map((e) => e.outerHTML.slice(0, 120))
  .concat([...document.querySelectorAll("img:not([alt])")].map((e) => e.outerHTML.slice(0, 120)));
