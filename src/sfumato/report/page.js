const root = document.documentElement, button = document.getElementById("theme");
const dark = () => (root.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
const show = () => { button.textContent = dark() ? "Light" : "Dark"; };
button.hidden = false;
button.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; show(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
show();
let closed = [];
addEventListener("beforeprint", () => {
  closed = [...document.querySelectorAll("details.printed:not([open])")];
  for (const one of closed) one.open = true;
});
addEventListener("afterprint", () => { for (const one of closed) one.open = false; });
