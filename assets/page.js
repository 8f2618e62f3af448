// Gradio mounts a page block by block, and each one pushes down what stands below. The page is shown once nothing moves any more.

const STEADY_FRAMES = 4;
const PATIENCE_MS = 4000; // as in the style: a block that never comes must not hide the others
const BLOCKS = ['intro', 'ask', 'status', 'settings', 'viewer'];

/** Lift the veil (the style in the page's head) when every block has its place and the last one stays where it is; then call `shown`. */
export function showWhenSteady(shown) {
  let before = null;
  let steady = 0;
  const look = () => {
    const blocks = BLOCKS.map((id) => document.getElementById(id));
    const top = blocks.every((block) => block?.offsetHeight) ? blocks.at(-1).getBoundingClientRect().top : null;
    steady = top !== null && top === before ? steady + 1 : 0;
    before = top;
    if (steady < STEADY_FRAMES && performance.now() < PATIENCE_MS) requestAnimationFrame(look);
    else {
      document.documentElement.dataset.cactus = 'steady';
      requestAnimationFrame(shown); // what the veil hides is hidden until then
    }
  };
  look();
}

/** An accordion that is closed would hide the sentence at a field that was refused: open it when one appears. */
export function openForErrors(id) {
  const accordion = document.getElementById(id);
  if (!accordion) {
    requestAnimationFrame(() => openForErrors(id));
    return;
  }
  new MutationObserver(() => {
    const refused = accordion.querySelector('.validation-error');
    if (refused && !refused.offsetParent) accordion.querySelector('button').click();
  }).observe(accordion, { childList: true, subtree: true });
}
