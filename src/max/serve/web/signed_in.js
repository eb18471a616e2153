// The page to which an authorization server sends the user: it gives the answer to the chat page that waits for it.

const PATIENCE_MS = 5000;
const query = location.search;
// the code stays neither in the address nor in the history
history.replaceState(null, "", location.pathname);
const state = new URLSearchParams(query).get("state");
const result = document.getElementById("result");
const channel = new BroadcastChannel("chat.sign-in");
const timer = setTimeout(() => {
  result.textContent = "No chat page waits for this sign-in: begin it again in the settings of the chat page.";
}, PATIENCE_MS);
channel.onmessage = ({ data }) => {
  if (!state || data.state !== state) return;
  clearTimeout(timer);
  if (data.waits) return;
  result.textContent = data.problem || "You are signed in. Close this page, and go on in the chat page.";
};
if (state) channel.postMessage({ query });
