start(() => {});
