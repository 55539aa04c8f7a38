// A live page: its server says what state the run is in, and the page is loaded again when that is not its own.
new EventSource("/events").onmessage = ({ data }) => {
  if (data === document.documentElement.dataset.state) return;
  sessionStorage.setItem("top", String(scrollY));
  location.reload();
};
scrollTo(0, Number(sessionStorage.getItem("top") || 0));
